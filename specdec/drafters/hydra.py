"""Hydra heads (Ankner et al. 2024): Medusa's, made to see the tokens drafted before them.

Head i of grounded heads reads the state of the prefix and the embeddings of x_{t+1} .. x_{t+1+i} side by side
(section 3). Hydra++ makes the state of the prefix with a decoder layer of its own (`prefix-mlp`).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from specdec.attention.base import LayerAttention
from specdec.drafters.attention import Attends
from specdec.drafters.base import FINAL_NORM, Borrowed, SequentialHeads, TargetParts
from specdec.drafters.blocks import block_family, probe_layers, run_block


class GroundedBlock(nn.Module):
    """R x + SiLU(W x + b): [..., n H] -> [..., H]; R is the identity where n is 1."""

    def __init__(self, size: int, num_inputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size * num_inputs, size)
        self.res_connection = nn.Linear(size * num_inputs, size) if num_inputs > 1 else nn.Identity()
        nn.init.zeros_(self.linear.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Apply the block."""
        kept: torch.Tensor = self.res_connection(inputs)
        return kept + F.silu(self.linear(inputs))


class PrefixLayer(nn.Module):
    """Hydra++'s decoder layer over the target's states, and a norm behind it (section 4.3)."""

    def __init__(self, target: TargetParts) -> None:
        super().__init__()
        family = block_family(target.config, 1)
        self.layers = nn.ModuleList([family.make_layer(0)])
        self.norm = family.make_norm()
        self.rotary = family.rotary
        self.attention_layers = probe_layers([self.layers[0]], self.rotary, target.hidden_size, 0)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Attends) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        rotary = self.rotary(hidden, positions)
        normed: torch.Tensor = self.norm(
            run_block(self.layers[0], hidden, position_embeddings=rotary, paged=attention)
        )
        return normed


class Hydra(SequentialHeads):
    """Heads `mlp`, or with a prefix layer `prefix-mlp`."""

    def __init__(
        self,
        target: TargetParts,
        *,
        num_heads: int,
        num_layers: int = 1,
        is_grounded: bool = True,
        has_prefix_layer: bool = False,
        hidden_state_offset: int = 0,
    ) -> None:
        super().__init__(target)
        size = target.hidden_size
        self.num_layers = num_layers
        self.is_grounded = is_grounded
        self.hidden_state_offset = hidden_state_offset
        self.prefix = PrefixLayer(target) if has_prefix_layer else None
        self.mlps = nn.ModuleList(
            nn.Sequential(
                GroundedBlock(size, depth + 2 if is_grounded else 1),
                *(GroundedBlock(size, 1) for _ in range(num_layers - 1)),
            )
            for depth in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(nn.Linear(size, target.vocab_size) for _ in range(num_heads))

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        if self.hidden_state_offset == 0:
            return (FINAL_NORM,)
        return (self.target.num_layers - self.hidden_state_offset,)

    @property
    def borrowed(self) -> frozenset[Borrowed]:
        return frozenset({"embeddings"} if self.is_grounded else ())

    @property
    def max_depth(self) -> int:
        return len(self.mlps)

    @property
    def attention_layers(self) -> tuple[LayerAttention, ...]:
        return () if self.prefix is None else self.prefix.attention_layers

    @torch.no_grad()
    def start_from_target(self) -> None:
        """Start as Medusa does: the state passes through, into the target's LM head."""
        weight = self.target.head_to_start_from()
        size = self.target.hidden_size
        for mlp, head in zip(self.mlps, self.lm_heads, strict=True):
            head.weight.copy_(weight)  # type: ignore[operator]
            nn.init.zeros_(head.bias)  # type: ignore[arg-type]
            kept = mlp[0].res_connection  # type: ignore[index]
            if isinstance(kept, nn.Linear):
                nn.init.zeros_(kept.weight)
                kept.weight[:, :size].fill_diagonal_(1.0)
                nn.init.zeros_(kept.bias)

    def prepare(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Attends) -> torch.Tensor:
        if self.prefix is None:
            return hidden
        prepared: torch.Tensor = self.prefix(hidden, positions, attention)
        return prepared

    def inputs(self, prepared: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        if not self.is_grounded:
            return prepared
        embedded = self.target.embeddings(path).flatten(-2).to(prepared.dtype)
        return torch.cat([prepared, embedded], dim=-1)

    def head(self, depth: int, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_heads[depth](self.mlps[depth](inputs))
        return logits
