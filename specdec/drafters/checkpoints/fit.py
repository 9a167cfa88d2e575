"""Puts published tensors into a module, or says which of them does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from specdec.core.errors import CheckpointError
from specdec.drafters.base import Drafter
from specdec.drafters.checkpoints.experts import Experts, shapes_of, stacked, stacked_experts
from specdec.drafters.checkpoints.files import DrafterFolder

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DrafterT = TypeVar("DrafterT", bound=Drafter)


def fit(
    drafter: DrafterT,
    folder: DrafterFolder,
    published: Callable[[str], str | None],
    *,
    is_ignored: Callable[[str], bool] = lambda _: False,
    converted: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor,
    dtype: torch.dtype | None = None,
) -> DrafterT:
    """Load the drafter's weights and return it in evaluation mode.

    Args:
        drafter: with random weights.
        folder: where its tensors are.
        published: from a name of its state to the name in the folder; None: it has its value already. Of
            experts that are stored one by one it is asked with the name that each would have.
        is_ignored: names in the folder that are known and not needed.
        converted: from a name of its state and the tensor in the folder to that of its state, of the same
            shape.
        dtype: of the loaded weights; None: as they are stored.

    Raises:
        CheckpointError: a tensor is missing, has another shape, holds no floating-point numbers, or is
            neither needed nor known.
    """
    state = drafter.state_dict()
    names = {name: stored for name in state if (stored := published(name)) is not None}
    apart = _stored_one_by_one(drafter, folder, names, published)
    wanted = {stored: tuple(state[name].shape) for name, stored in names.items() if name not in apart}
    for name, experts in apart.items():
        wanted |= shapes_of(experts, state[name])
    check_shapes(folder, wanted)
    extra = sorted(name for name in folder.shapes.keys() - wanted.keys() if not is_ignored(name))
    if extra:
        kind = type(drafter).__name__
        raise CheckpointError(
            f"{folder.path}: the weights hold {len(extra)} tensors that a drafter of kind {kind} with this "
            f"config.json does not have, first {extra[0]} of shape {folder.shapes[extra[0]]}"
        )
    ignored = sorted(folder.shapes.keys() - wanted.keys())
    if ignored:
        logger.info("%s: %d tensors are no weights of it, first %s", folder.path, len(ignored), ignored[0])
    tensors = folder.read(wanted)
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{folder.path}: tensor {name} holds {tensor.dtype}; only float32, bfloat16 and float16 are "
                "read, not quantized weights"
            )
    loaded = {
        name: converted(name, stacked(apart[name], tensors) if name in apart else tensors[stored])
        for name, stored in names.items()
    }
    drafter.load_state_dict(state | loaded, assign=True)
    if dtype is not None:
        # Tables of rotary frequencies are no weights: rounded, they turn far positions by other angles.
        for parameter in drafter.parameters():
            parameter.data = parameter.data.to(dtype)
    return drafter.eval()


def _stored_one_by_one(
    drafter: Drafter, folder: DrafterFolder, names: Mapping[str, str], published: Callable[[str], str | None]
) -> dict[str, Experts]:
    """Return, by name of the drafter's state, the names in the folder of what it stacks."""
    apart: dict[str, Experts] = {}
    for name, experts in stacked_experts(drafter).items():
        stored = tuple(tuple(published(part) or part for part in parts) for parts in experts)
        is_stacked = name not in names or names[name] in folder.shapes
        if not is_stacked and any(part in folder.shapes for parts in stored for part in parts):
            apart[name] = stored
    return apart


def check_shapes(folder: DrafterFolder, wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Check that these tensors are there, in these shapes.

    Raises:
        CheckpointError: naming the first that is not.
    """
    missing = sorted(wanted.keys() - folder.shapes.keys())
    if missing:
        raise CheckpointError(
            f"{folder.path}: the weights lack {len(missing)} tensors, first {missing[0]} of shape "
            f"{wanted[missing[0]]}"
        )
    for name in sorted(wanted):
        if folder.shapes[name] != wanted[name]:
            raise CheckpointError(
                f"{folder.path}: tensor {name} has shape {folder.shapes[name]}; by config.json and the "
                f"target it must be {wanted[name]}"
            )


def is_rotary_buffer(name: str) -> bool:
    """Whether a tensor is one that transformers once stored and now computes."""
    return name.endswith(("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"))
