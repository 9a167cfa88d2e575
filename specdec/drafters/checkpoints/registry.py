"""Which format a folder is in, by what it holds, and its drafter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Literal, get_args

import torch

from specdec.core.errors import CheckpointError
from specdec.drafters.base import Drafter, TargetParts
from specdec.drafters.checkpoints.eagle import load_eagle, require_original
from specdec.drafters.checkpoints.eagle3 import load_eagle3
from specdec.drafters.checkpoints.files import FILES_OF_HEADS, DrafterFolder, open_drafter, pickled_error
from specdec.drafters.checkpoints.hydra import ARCHITECTURE_KEY, load_hydra
from specdec.drafters.checkpoints.medusa import has_medusa, load_medusa
from specdec.drafters.checkpoints.mtp import has_mtp, load_mtp
from specdec.drafters.checkpoints.parallel_heads import HEAD_PREFIX, load_parallel_heads
from specdec.drafters.checkpoints.speculators import KIND_KEY, kind_of_speculator, load_speculator
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.mtp import Mtp
from specdec.drafters.parallel_heads import ParallelHeads

logger = logging.getLogger(__name__)

DrafterKind = Literal["eagle3", "eagle", "medusa", "hydra", "mtp", "parallel_heads"]
DRAFTERS: Mapping[DrafterKind, type[Drafter]] = {
    "medusa": Medusa,
    "hydra": Hydra,
    "eagle": Eagle,
    "eagle3": Eagle3,
    "mtp": Mtp,
    "parallel_heads": ParallelHeads,
}
"""What is loaded of each kind."""
DrafterFormat = DrafterKind | Literal["speculators"]
Load = Callable[[DrafterFolder, TargetParts, torch.dtype | None], Drafter]

_KNOWN = (
    "known are EAGLE, EAGLE-3, Medusa, Hydra, MTP modules, parallel heads and speculators' eagle3 and mtp"
)
_EAGLE3_TENSORS = ("layers.0.hidden_norm.weight", "d2t")
_EAGLE3_KEY = "eagle_config"
_EAGLE_TENSORS = {"fc.weight", "fc.bias"}
_LOADERS: dict[DrafterFormat, Load] = {
    "speculators": load_speculator,
    "eagle3": load_eagle3,
    "eagle": load_eagle,
    "medusa": load_medusa,
    "hydra": load_hydra,
    "mtp": load_mtp,
    "parallel_heads": load_parallel_heads,
}
assert set(_LOADERS) == {*get_args(DrafterKind), "speculators"}


def detect(folder: DrafterFolder) -> DrafterFormat:
    """Return the format of a folder.

    Names of tensors decide, because config.json often says "llama", unless that has a key of one format.

    Raises:
        CheckpointError: it holds no drafter, or one of a kind that is not supported.
    """
    if KIND_KEY in folder.config:
        return "speculators"
    architectures = folder.config.get("architectures")
    if any("dflash" in str(one).lower() for one in architectures or ()):  # names of tensors are as EAGLE's
        raise CheckpointError(
            f"{folder.path} holds a DFlash drafter (architectures {architectures!r}), which drafts whole "
            f"blocks at once: that is not supported; {_KNOWN}"
        )
    names = {name.removeprefix("model.") for name in folder.shapes}
    if any(name.startswith("hydra_mlp.") for name in names):
        return "hydra"
    # `eagle-attn` has tensors that are named as EAGLE's. Beside a target config.json is that of both.
    if ARCHITECTURE_KEY in folder.config and not (folder.passed_over or has_medusa(folder)):
        return "hydra"
    if _is_eagle3(folder, names):
        return "eagle3"
    if has_medusa(folder):
        return "medusa"
    if has_mtp(folder):
        return "mtp"
    if any(name.startswith(HEAD_PREFIX) for name in names):
        return "parallel_heads"
    if names & _EAGLE_TENSORS or _is_headless_layer(folder):
        require_original(folder)
        return "eagle"
    if pickled := [file for file in folder.passed_over if file.suffix != ".safetensors"]:
        raise pickled_error(pickled[0])
    raise CheckpointError(
        f"{folder.path} holds no drafter of a known format (architectures {architectures!r}): {_KNOWN}; an "
        "ordinary small model is a draft model (method draft_model)"
    )


def _is_eagle3(folder: DrafterFolder, names: Set[str]) -> bool:
    """Whether tensors are EAGLE-3's, or config.json says so: without fused states those need not be there."""
    architectures = folder.config.get("architectures")
    return (
        any(name.startswith("midlayer.") or name in _EAGLE3_TENSORS for name in names)
        or any("eagle3" in str(one).lower() for one in architectures or ())
        or (_EAGLE3_KEY in folder.config and not names & _EAGLE_TENSORS)
    )


def _is_headless_layer(folder: DrafterFolder) -> bool:
    """Whether no norm is before the first of bare decoder layers: EAGLE's, though its `fc` is missing."""
    layer = "layers.0."
    return (
        f"{layer}self_attn.q_proj.weight" in folder.shapes
        and f"{layer}input_layernorm.weight" not in folder.shapes
    )


def kind_of(folder: DrafterFolder) -> DrafterKind:
    """Return what drafts with the weights of a folder, in whichever format they are.

    Raises:
        CheckpointError: it holds no drafter, or one of a kind that is not supported.
    """
    found = detect(folder)
    return kind_of_speculator(folder) if found == "speculators" else found


def load_drafter(
    path: str | Path,
    target: TargetParts,
    dtype: torch.dtype | None = None,
    *,
    kind: DrafterKind | None = None,
    allow_pickled: bool = False,
) -> Drafter:
    """Load the drafter of a folder for `target`, in evaluation mode on the host.

    `path` may be the target's own folder, for modules inside it. `dtype` None: as it is stored. `kind` (what
    is asked for, beside what else there may be) and `allow_pickled` are as in `open_drafter`.

    Raises:
        CheckpointError: naming the file, key or tensor at fault; also where all that is there of `kind` is
            pickled, and nobody allowed that.
    """
    folder = open_drafter(path, kind=kind, allow_pickled=allow_pickled)
    for file in folder.passed_over:
        if kind is not None and file.stem == FILES_OF_HEADS.get(kind):
            raise pickled_error(file)
    return load_opened(folder, target, dtype)


def load_opened(folder: DrafterFolder, target: TargetParts, dtype: torch.dtype | None = None) -> Drafter:
    """Load the drafter of a folder that has been looked at, as `load_drafter` does.

    Raises:
        CheckpointError: naming the file, key or tensor at fault.
    """
    found = detect(folder)
    drafter = _LOADERS[found](folder, target, dtype)
    logger.info("%s: a drafter in the format %s", folder.path, found)
    return drafter
