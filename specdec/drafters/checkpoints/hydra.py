"""Hydra heads as their authors publish them.

`hydra_lm_head.pt` (or `.safetensors`): `hydra_mlp.{i}.{j}.{linear,res_connection}`, `hydra_lm_head.{i}`. With
a prefix layer there are dropouts between the modules, without weights, which count: `hydra_mlp.{i}.{2j+1}`,
`hydra_lm_head.{i}.1`, and `prefix_embeding_layer.{layers.0,norm}` (spelt so). The authors' state also holds
the target's embeddings as `input_embed_fn`, and a prefix layer's own, which nobody reads.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.borrowed import stored_beside, weight_of
from specdec.drafters.checkpoints.files import DrafterFolder, TensorFormat, write_drafter
from specdec.drafters.checkpoints.fit import fit, is_rotary_buffer
from specdec.drafters.checkpoints.keys import Keys
from specdec.drafters.hydra import Hydra

ARCHITECTURE_KEY = "hydra_head_arch"
_ARCHITECTURES = {"mlp": False, "prefix-mlp": True}
_BORROWED = "input_embed_fn.weight"
_UNUSED = "prefix_embeding_layer.embed_tokens.weight"


def load_hydra(folder: DrafterFolder, target: TargetParts, dtype: torch.dtype | None = None) -> Hydra:
    """Read the heads of `folder`.

    Raises:
        CheckpointError: naming the key or tensor at fault.
    """
    keys = Keys(folder.path, folder.config)
    architecture = keys.content.get(ARCHITECTURE_KEY, "mlp")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise keys.wrong(
            ARCHITECTURE_KEY, f"Hydra heads of this architecture are not supported, those of {known} are"
        )
    keys.check_target(target, keys.content.get("hidden_size"))
    offset = keys.content.get("hidden_state_offset", 0)
    if type(offset) is not int or not 0 <= offset <= target.num_layers:
        raise keys.wrong("hidden_state_offset", f"it must be an integer from 0 to {target.num_layers}")
    drafter = Hydra(
        target,
        num_heads=keys.positive("hydra_num_heads"),
        num_layers=keys.positive("hydra_num_layers", 1),
        is_grounded=keys.flag("grounded_heads", default=False),
        has_prefix_layer=_ARCHITECTURES[architecture],
        hidden_state_offset=offset,
    )
    return fit(
        drafter,
        folder,
        lambda name: _published(name, drafter),
        is_ignored=lambda name: name in (_BORROWED, _UNUSED) or is_rotary_buffer(name),
        dtype=dtype,
    )


def save_hydra(
    drafter: Hydra, folder: Path, *, base_model: str, file_format: TensorFormat = "safetensors"
) -> None:
    """Write the heads, with the target's embeddings; `base_model` names the target they were made for."""
    config = {
        "hydra_num_heads": len(drafter.mlps),
        "hydra_num_layers": drafter.num_layers,
        ARCHITECTURE_KEY: "mlp" if drafter.prefix is None else "prefix-mlp",
        "grounded_heads": drafter.is_grounded,
        "hidden_state_offset": drafter.hidden_state_offset,
        "base_model_name_or_path": base_model,
        "hidden_size": drafter.target.hidden_size,
        "vocab_size": drafter.target.vocab_size,
        "model_type": "hydra",
    }
    tensors = {_published(name, drafter): tensor for name, tensor in drafter.state_dict().items()}
    embeddings = stored_beside(drafter, weight_of(drafter.target.embeddings))
    tensors |= dict.fromkeys((_BORROWED,) if drafter.prefix is None else (_BORROWED, _UNUSED), embeddings)
    write_drafter(folder, config, tensors, file_name=f"hydra_lm_head.{file_format}")


def _published(name: str, drafter: Hydra) -> str:
    if name.startswith("prefix."):
        return "prefix_embeding_layer." + name.removeprefix("prefix.")
    has_dropouts = drafter.prefix is not None
    if name.startswith("lm_heads."):
        head, kind = name.removeprefix("lm_heads.").split(".")
        return f"hydra_lm_head.{head}.1.{kind}" if has_dropouts else f"hydra_lm_head.{head}.{kind}"
    match = re.match(r"^mlps\.(\d+)\.(\d+)\.(.+)$", name)
    assert match is not None, name
    head, block, rest = match.groups()
    place = 2 * int(block) + 1 if has_dropouts else int(block)
    return f"hydra_mlp.{head}.{place}.{rest}"
