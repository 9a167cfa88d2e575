"""EAGLE-1 and -2 heads as SafeAILab publishes them.

config.json is that of a Llama with few layers, and `bias` of `fc` (true where it is missing); its
`model_type` may be the target's (`layers.py`). Tensors:
`embed_tokens.weight`, `fc.{weight,bias}`, `layers.{i}.*`, without an input norm in layer 0 or a final norm.
"""

from __future__ import annotations

from pathlib import Path

import torch

from specdec.core.errors import CheckpointError
from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.borrowed import embedding_rows, has_own, stored_beside
from specdec.drafters.checkpoints.described import described
from specdec.drafters.checkpoints.files import DrafterFolder, write_drafter
from specdec.drafters.checkpoints.fit import fit, is_rotary_buffer
from specdec.drafters.checkpoints.keys import Keys
from specdec.drafters.checkpoints.layers import match_biases, read_layer_config
from specdec.drafters.eagle import Eagle

_EMBEDDINGS = "embed_tokens.weight"


def load_eagle(folder: DrafterFolder, target: TargetParts, dtype: torch.dtype | None = None) -> Eagle:
    """Read the head of `folder`; embeddings in it that are the target's are not kept twice.

    Raises:
        CheckpointError: naming the key or tensor at fault.
    """
    keys = Keys(folder.path, folder.config)
    prefix = name_prefix(folder, "fc.weight")
    config = read_layer_config(folder, keys, f"{prefix}layers.0.")
    keys.positive("num_hidden_layers")
    keys.check_target(target, config.hidden_size)
    has_bias = f"{prefix}fc.bias" in folder.shapes
    if keys.content.get("bias") is not None and keys.flag("bias", default=True) != has_bias:
        holds = "hold" if has_bias else "lack"
        raise keys.wrong("bias", f"the weights {holds} {prefix}fc.bias")
    embeddings = f"{prefix}{_EMBEDDINGS}"
    drafter = Eagle(
        target,
        config,
        has_bias=has_bias,
        has_embeddings=embeddings in folder.shapes
        and has_own(folder, [embeddings], target, embedding_rows(target)),
    )
    for index, layer in enumerate(drafter.layers):
        match_biases(layer.self_attn, folder, f"{prefix}layers.{index}.")
    return fit(
        drafter,
        folder,
        lambda name: prefix + name,
        is_ignored=lambda name: name in (embeddings, "lm_head.weight") or is_rotary_buffer(name),
        dtype=dtype,
    )


def require_original(folder: DrafterFolder) -> None:
    """Check that EAGLE's tensors in a folder are laid out as its authors do.

    Of the versions of vLLM's first engine, for which heads were converted, some apply a norm before the first
    layer and one behind the last, others neither, and files need not say for which they were made.

    Raises:
        CheckpointError: they were converted.
    """
    if "fc.weight" in folder.shapes and any(name.startswith("model.layers.") for name in folder.shapes):
        raise CheckpointError(
            f"{folder.path} holds an EAGLE head that was converted for vLLM's first engine (fc.weight beside "
            "model.layers.*, keys of its layer under `model` in config.json): that is not supported; give it "
            "as EAGLE's authors (SafeAILab) publish heads, with fc.weight beside layers.*"
        )


def save_eagle(drafter: Eagle, folder: Path) -> None:
    """Write the head, with the embeddings that it computes with: EAGLE-1's own code takes no file without."""
    config = described(drafter.config) | {
        "architectures": ["LlamaForCausalLM"],
        "bias": drafter.fc.bias is not None,
        "tie_word_embeddings": False,
    }
    tensors = drafter.state_dict()
    if drafter.embed_tokens is None:
        tensors[_EMBEDDINGS] = stored_beside(drafter, embedding_rows(drafter.target))
    write_drafter(folder, config, tensors)


def name_prefix(folder: DrafterFolder, name: str) -> str:
    """Return what stands before all names: some tools wrap the head in a module called `model`."""
    is_wrapped = name not in folder.shapes and any(stored.startswith("model.") for stored in folder.shapes)
    return "model." if is_wrapped else ""
