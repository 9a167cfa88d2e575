"""Medusa heads (Cai et al. 2024, section 2.1.1).

The target is frozen (Medusa-1), or was trained with them (Medusa-2): the heads are the same.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from specdec.drafters.base import FINAL_NORM, Borrowed, IndependentHeads, TargetParts


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); the identity at first, because W and b are zero."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        return hidden + F.silu(self.linear(hidden))


class Medusa(IndependentHeads):
    """Head i: residual blocks and an LM head of its own, over the state that the target's LM head reads."""

    def __init__(self, target: TargetParts, *, num_heads: int, num_layers: int = 1) -> None:
        super().__init__(target)
        size = target.hidden_size
        self.heads = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(size) for _ in range(num_layers)),
                nn.Linear(size, target.vocab_size, bias=False),
            )
            for _ in range(num_heads)
        )
        self.num_layers = num_layers

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (FINAL_NORM,)

    @property
    def borrowed(self) -> frozenset[Borrowed]:
        return frozenset()

    @property
    def max_depth(self) -> int:
        return len(self.heads)

    @torch.no_grad()
    def start_from_target(self) -> None:
        """Give every head the target's LM head, so that training starts from what predicts x_{t+1}."""
        weight = self.target.head_to_start_from()
        for head in self.heads:
            last = head[-1]  # type: ignore[index]
            last.weight.copy_(weight)

    def head(self, depth: int, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.heads[depth](inputs)
        return logits
