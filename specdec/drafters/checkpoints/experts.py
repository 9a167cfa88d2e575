"""Experts of a mixture: one tensor for all of a layer in transformers, one for each in what is published.

Since transformers 5 a layer has `experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I].
Published are `experts.{e}.{gate,up,down}_proj.weight`, matrices of one expert each. Kinds of experts that do
not stand so in the stack (gpt-oss's, whose matrices are transposed) are published as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Experts = tuple[tuple[str, ...], ...]
"""Names of what is stacked: for each expert those of its matrices, whose rows follow each other."""

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def stacked_experts(module: nn.Module) -> dict[str, Experts]:
    """Return the stacks in the state of `module` that are published expert by expert, by name."""
    found: dict[str, Experts] = {}
    for path, child in module.named_modules():
        experts: Any = child
        if not getattr(experts, "is_concatenated", False) or not experts.has_gate:
            continue
        if experts.is_transposed or experts.has_bias:
            continue
        for stack, parts in _PARTS.items():
            found[f"{path}.{stack}"] = tuple(
                tuple(f"{path}.{index}.{part}.weight" for part in parts)
                for index in range(len(experts.down_proj))
            )
    return found


def shapes_of(experts: Experts, stack: torch.Tensor) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the matrices of a stack, by name."""
    _, num_rows, num_columns = stack.shape
    return {name: (num_rows // len(names), num_columns) for names in experts for name in names}


def stacked(experts: Experts, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the stack of matrices in `tensors`, which are taken out of it: a layer may be of many GiB."""
    return torch.stack([torch.cat([tensors.pop(name) for name in names]) for names in experts])


def one_by_one(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of `module` with a matrix for each expert; nothing is copied."""
    state: dict[str, torch.Tensor] = module.state_dict()
    for stack, experts in stacked_experts(module).items():
        for matrix, names in zip(state.pop(stack), experts, strict=True):
            state |= zip(names, matrix.chunk(len(names)), strict=True)
    return state
