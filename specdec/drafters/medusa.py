"""Medusa heads (Cai et al. 2024, section 2.1.1).

Where a token's logits come from differs among published heads: from an LM head of each (the paper), from one
for all, or from the target's.

The target is frozen (Medusa-1), or was trained with them (Medusa-2): the heads are the same.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from specdec.drafters.base import FINAL_NORM, Borrowed, IndependentHeads, TargetParts
from specdec.drafters.vocabulary import DraftVocabulary

LmHeads = Literal["each", "one", "target"]
"""Who has an LM head: each of the heads, all of them one, or only the target."""


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); the identity at first, because W and b are zero."""

    def __init__(self, size: int, *, has_bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=has_bias)
        for parameter in self.linear.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        return hidden + F.silu(self.linear(hidden))


class Medusa(IndependentHeads):
    """Head i: residual blocks and an LM head, over the state that the target's LM head reads."""

    def __init__(
        self,
        target: TargetParts,
        *,
        num_heads: int,
        num_layers: int = 1,
        has_bias: bool = True,
        lm_heads: LmHeads = "each",
        known_ids: DraftVocabulary | None = None,
    ) -> None:
        """Make heads of `num_layers` residual blocks.

        `has_bias` is of the blocks; `known_ids`: what the LM heads here know, all ids by default. Logits are
        over all ids anyway, -inf for those that they do not know.
        """
        super().__init__(target)
        assert known_ids is None or lm_heads != "target", "the target's LM head knows all ids"
        size = target.hidden_size
        num_logits = target.vocab_size if known_ids is None else known_ids.size

        def lm_head() -> nn.Linear:
            return nn.Linear(size, num_logits, bias=False)

        self.heads = nn.ModuleList(
            nn.Sequential(
                *(ResidualBlock(size, has_bias=has_bias) for _ in range(num_layers)),
                *([lm_head()] if lm_heads == "each" else []),
            )
            for _ in range(num_heads)
        )
        self.num_layers = num_layers
        self.lm_heads = lm_heads
        self.lm_head = lm_head() if lm_heads == "one" else None
        self.known_ids = known_ids

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (FINAL_NORM,)

    @property
    def borrowed(self) -> frozenset[Borrowed]:
        return frozenset({"head"} if self.lm_heads == "target" else ())

    @property
    def max_depth(self) -> int:
        return len(self.heads)

    @torch.no_grad()
    def start_from_target(self) -> None:
        """Give every head the target's LM head, so that training starts from what predicts x_{t+1}."""
        assert self.lm_heads == "each", "other heads are not trained here"
        assert self.known_ids is None, "training is over all ids"
        weight = self.target.head_to_start_from()
        for head in self.heads:
            last = head[-1]  # type: ignore[index]
            last.weight.copy_(weight)

    def head(self, depth: int, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.heads[depth](inputs)
        if self.lm_heads == "target":
            return self.target.logits(outputs)
        if self.lm_head is not None:
            outputs = self.lm_head(outputs)
        return outputs if self.known_ids is None else self.known_ids.expand(outputs)
