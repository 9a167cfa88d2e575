"""Parallel heads (Gloeckle et al. 2024, section 2): one decoder layer per token ahead, on the same trunk.

    P(x_{t+n} | x_{<=t}) = softmax(head(norm(layer_n(trunk(x)_t))))

The trunk is the target without its last layer, which is layer 1; norm and head are the target's. What is here
are layers 2, 3, ...
"""

from __future__ import annotations

import torch
from torch import nn

from specdec.attention.base import LayerAttention
from specdec.drafters.attention import Attends
from specdec.drafters.base import Borrowed, IndependentHeads, TargetParts
from specdec.drafters.blocks import block_family, probe_layers, run_block


class ParallelHeads(IndependentHeads):
    """Decoder layers of the target's kind, each with K/V of its own."""

    def __init__(self, target: TargetParts, *, num_heads: int) -> None:
        super().__init__(target)
        first = int(target.config.num_hidden_layers)
        family = block_family(target.config, first + num_heads)
        self.extra_heads = nn.ModuleList(family.make_layer(first + index) for index in range(num_heads))
        self.rotary = family.rotary
        self._attention_layers = probe_layers(list(self.extra_heads), self.rotary, target.hidden_size, first)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (self.target.num_layers - 1,)

    @property
    def borrowed(self) -> frozenset[Borrowed]:
        return frozenset({"head"})

    @property
    def max_depth(self) -> int:
        return len(self.extra_heads)

    @property
    def attention_layers(self) -> tuple[LayerAttention, ...]:
        return self._attention_layers

    @property
    def prepared_size(self) -> int:
        return len(self.extra_heads) * self.target.hidden_size

    def prepare(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Attends) -> torch.Tensor:
        rotary = self.rotary(hidden, positions)
        outputs = [
            run_block(layer, hidden, position_embeddings=rotary, paged=attention)
            for layer in self.extra_heads
        ]
        return torch.cat(outputs, dim=-1)

    def head(self, depth: int, inputs: torch.Tensor) -> torch.Tensor:
        part = inputs.chunk(len(self.extra_heads), dim=-1)[depth]
        return self.target.logits(self.target.final_norm(part))
