"""Decoder layers and drafts written out from their formulas, without the modules under test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

Weights = Mapping[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def rotate(x: torch.Tensor, position: int, theta: float = 10000.0) -> torch.Tensor:
    """Rotary embedding of [heads, D] at one position: dimension i turns with i + D/2."""
    half = x.shape[-1] // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Memory:
    """Keys and values that one row sees, in any order."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        self.pairs = list(pairs)

    def extended(self, key: torch.Tensor, value: torch.Tensor) -> Memory:
        return Memory([*self.pairs, (key, value)])


def attention(
    x: torch.Tensor, position: int, weights: Weights, prefix: str, head_dim: int, memory: Memory
) -> tuple[torch.Tensor, Memory]:
    """One row [in] at `position`, over `memory` and itself."""

    def projected(name: str) -> torch.Tensor:
        y = weights[f"{prefix}{name}_proj.weight"] @ x
        bias = weights.get(f"{prefix}{name}_proj.bias")
        return (y if bias is None else y + bias).view(-1, head_dim)

    query, key = rotate(projected("q"), position), rotate(projected("k"), position)
    seen = memory.extended(key, projected("v"))
    groups = len(query) // len(key)
    heads = []
    for head, q in enumerate(query):
        scores = torch.stack([q @ k[head // groups] / math.sqrt(head_dim) for k, _ in seen.pairs])
        shares = scores.softmax(dim=0)
        heads.append(sum(s * v[head // groups] for s, (_, v) in zip(shares, seen.pairs, strict=True)))
    mixed = torch.cat(heads)  # type: ignore[arg-type]
    return weights[f"{prefix}o_proj.weight"] @ mixed, seen


def swiglu(x: torch.Tensor, weights: Weights, prefix: str) -> torch.Tensor:
    gate = weights[f"{prefix}gate_proj.weight"] @ x
    return weights[f"{prefix}down_proj.weight"] @ (
        gate * torch.sigmoid(gate) * (weights[f"{prefix}up_proj.weight"] @ x)
    )


def llama_layer(
    x: torch.Tensor, position: int, weights: Weights, prefix: str, head_dim: int, eps: float, memory: Memory
) -> tuple[torch.Tensor, Memory]:
    """A Llama decoder layer for one row; without an input norm where the weights have none."""
    norm = weights.get(f"{prefix}input_layernorm.weight")
    inputs = x if norm is None else rms_norm(x, norm, eps)
    attended, seen = attention(inputs, position, weights, f"{prefix}self_attn.", head_dim, memory)
    x = x + attended
    normed = rms_norm(x, weights[f"{prefix}post_attention_layernorm.weight"], eps)
    return x + swiglu(normed, weights, f"{prefix}mlp."), seen
