"""MTP modules inside a target's own checkpoint.

DeepSeek-V3's layout: layers behind the last, `model.layers.{N+i}.{enorm,hnorm,eh_proj,shared_head.norm,
shared_head.head,embed_tokens}` and a decoder layer. Qwen3-Next's: `mtp.{fc,norm,pre_fc_norm_embedding,
pre_fc_norm_hidden}` and `mtp.layers.0`. MiMo's: `model.mtp_layers.{i}.{token_layernorm,hidden_layernorm,
input_proj,final_layernorm}` and a decoder layer, with the state before the embedding where the others have it
behind. They may be in the model's files or in another one beside them. Experts of a mixture are stored one by
one (`experts.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from specdec.core.errors import CheckpointError
from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.borrowed import has_own, stored_beside, weight_of
from specdec.drafters.checkpoints.described import described
from specdec.drafters.checkpoints.experts import one_by_one
from specdec.drafters.checkpoints.files import DrafterFolder, write_drafter, write_tensors
from specdec.drafters.checkpoints.fit import fit, is_rotary_buffer
from specdec.drafters.checkpoints.keys import Keys
from specdec.drafters.mtp import Mtp

_DEEPSEEK = re.compile(r"^model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|shared_head\.norm)\.weight$")
_QWEN = "mtp.fc.weight"
_QWEN_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "norm": "mtp.norm",
}
_MIMO = re.compile(r"^model\.mtp_layers\.(\d+)\.input_proj\.weight$")
_MIMO_PREFIX = "model.mtp_layers."
_MIMO_NAMES = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "norm": "final_layernorm",
}
_EMBEDDINGS, _HEAD = "embed_tokens.weight", "shared_head.head.weight"
MTP_FILE = "mtp.safetensors"


def has_mtp(folder: DrafterFolder) -> bool:
    """Whether a target's folder holds MTP modules."""
    return _QWEN in folder.shapes or any(_DEEPSEEK.match(name) or _MIMO.match(name) for name in folder.shapes)


def load_mtp(folder: DrafterFolder, target: TargetParts, dtype: torch.dtype | None = None) -> Mtp:
    """Read the modules of a target's folder (see `files.open_drafter`).

    Embeddings and head that are stored with the modules are the target's, as the report has it; where they
    are not (a target that was fine-tuned alone), the modules keep their own.

    Raises:
        CheckpointError: naming the key or tensor at fault.
    """
    keys = Keys(folder.path, folder.config)
    if _QWEN in folder.shapes:
        stated = keys.positive("mtp_num_hidden_layers", 1)
        if stated != 1:
            raise keys.wrong("mtp_num_hidden_layers", "one such module is supported")
        return _fit(Mtp(target), folder, _qwen_name, "mtp.", dtype)
    if of_mimo := sorted(int(match.group(1)) for name in folder.shapes if (match := _MIMO.match(name))):
        num_modules = keys.positive("num_nextn_predict_layers", len(of_mimo))
        if of_mimo != list(range(num_modules)):
            raise keys.wrong("num_nextn_predict_layers", f"the weights hold modules {of_mimo}")
        return _fit(Mtp(target, num_modules=num_modules), folder, _mimo_name, _MIMO_PREFIX, dtype, _of_mimo)
    found = sorted({int(match.group(1)) for name in folder.shapes if (match := _DEEPSEEK.match(name))})
    # Behind layers that do nothing the modules are those of the target without them.
    first = int(target.config.num_hidden_layers)
    if found[:1] == [target.num_layers]:
        first = target.num_layers
    if not found:
        raise CheckpointError(
            f"{folder.path}: the weights hold no MTP modules (model.layers.{first}.eh_proj.weight or {_QWEN})"
        )
    num_modules = keys.positive("num_nextn_predict_layers", len(found))
    if found != list(range(first, first + num_modules)):
        raise keys.wrong("num_nextn_predict_layers", f"the weights hold modules in layers {found}")
    drafter = Mtp(
        target,
        num_modules=num_modules,
        has_embeddings=has_own(folder, _of_layers(found, _EMBEDDINGS), target, weight_of(target.embeddings)),
        has_head=has_own(folder, _of_layers(found, _HEAD), target, weight_of(target.head)),
    )
    return _fit(drafter, folder, lambda name: _deepseek_name(name, first), "", dtype)


def save_mtp(drafter: Mtp, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write the modules beside the target in `folder`, in DeepSeek-V3's layout.

    `dtype` is what is stored; None: that of the modules. config.json must say `num_nextn_predict_layers`.
    """
    tensors = _published_tensors(drafter)
    write_tensors(
        folder / MTP_FILE, {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}
    )


def save_modules(drafter: Mtp, folder: Path) -> None:
    """Write the modules to a folder of their own, in DeepSeek-V3's layout."""
    config = described(drafter.target.config) | {
        "num_nextn_predict_layers": len(drafter.mtp_modules),
        "tie_word_embeddings": False,
    }
    write_drafter(folder, config, _published_tensors(drafter))


def _of_layers(layers: Sequence[int], part: str) -> list[str]:
    return [f"model.layers.{layer}.{part}" for layer in layers]


def _published_tensors(drafter: Mtp) -> dict[str, torch.Tensor]:
    """Return the weights by their names, with embeddings and head in each module, as they are published."""
    first, target = drafter.first_layer, drafter.target
    tensors = {_deepseek_name(name, first): tensor for name, tensor in one_by_one(drafter).items()}
    shared = {
        _EMBEDDINGS: weight_of(drafter.embed_tokens or target.embeddings),
        _HEAD: weight_of(drafter.head or target.head),
    }
    for index in range(first, first + len(drafter.mtp_modules)):
        tensors |= {
            f"model.layers.{index}.{name}": stored_beside(drafter, weight) for name, weight in shared.items()
        }
    return tensors


def _fit(
    drafter: Mtp,
    folder: DrafterFolder,
    published: Callable[[str], str],
    prefix: str,
    dtype: torch.dtype | None,
    converted: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor,
) -> Mtp:
    """Load; everything of the folder that is not of the modules is the target's own."""
    first = drafter.first_layer

    def is_ignored(name: str) -> bool:
        if prefix:
            return not name.startswith(prefix) or is_rotary_buffer(name)
        match = re.match(r"^model\.layers\.(\d+)\.(.+)$", name)
        is_of_target = match is None or int(match.group(1)) < first
        return is_of_target or name.endswith((_EMBEDDINGS, _HEAD)) or is_rotary_buffer(name)

    return fit(drafter, folder, published, is_ignored=is_ignored, converted=converted, dtype=dtype)


def _deepseek_name(name: str, first: int) -> str:
    if name.startswith("embed_tokens."):
        return f"model.layers.{first}.{name}"
    if name.startswith("head."):
        return f"model.layers.{first}.shared_head.{name}"
    match = re.match(r"^mtp_modules\.(\d+)\.(.+)$", name)
    assert match is not None, name
    index, rest = match.groups()
    rest = f"shared_head.{rest}" if rest.startswith("norm.") else rest.removeprefix("block.")
    return f"model.layers.{first + int(index)}.{rest}"


def _qwen_name(name: str) -> str:
    part, _, rest = name.removeprefix("mtp_modules.0.").partition(".")
    return f"mtp.layers.0.{rest}" if part == "block" else f"{_QWEN_NAMES[part]}.{rest}"


def _mimo_name(name: str) -> str:
    module, part, rest = name.removeprefix("mtp_modules.").split(".", 2)
    return f"{_MIMO_PREFIX}{module}.{rest if part == 'block' else f'{_MIMO_NAMES[part]}.{rest}'}"


def _of_mimo(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not name.endswith(".eh_proj.weight"):
        return tensor
    of_state, of_embedding = tensor.chunk(2, dim=1)
    return torch.cat([of_embedding, of_state], dim=1)
