"""Attention of batched sampling, beside a plain computation of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training.generation import grouped_decode_attention

HEADS, KV_HEADS, SIZE, SCALING = 4, 2, 8, 0.3


def plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """Attention [B, T, heads, D], head by head; `seen` bool [B, 1, T, S]."""
    groups = HEADS // KV_HEADS
    outputs = []
    for head in range(HEADS):
        scores = query[:, head] @ key[:, head // groups].transpose(1, 2) * SCALING
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen[:, 0], float("-inf")).softmax(-1)
        outputs.append(weights @ value[:, head // groups])
    return torch.stack(outputs, dim=2)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("length", [1, 5])
def test_attention_is_what_it_says(length: int, is_masked: bool, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(length)
    num_keys = 9 if is_masked else length
    query = 3.0 * torch.randn((2, HEADS, length, SIZE), generator=generator)
    key, value = torch.randn((2, 2, KV_HEADS, num_keys, SIZE), generator=generator)
    seen = torch.ones((length, num_keys), dtype=torch.bool).tril(num_keys - length)[None, None]
    seen = seen.expand(2, 1, -1, -1).clone()
    if is_masked:
        seen[1, :, :, :3] = False
    got, _ = grouped_decode_attention(
        nn.Identity(), query, key, value, seen if is_masked else None, SCALING, softcap=softcap
    )
    torch.testing.assert_close(got, plainly(query, key, value, seen, softcap), atol=1e-5, rtol=1e-5)
    if softcap is not None:
        assert not torch.allclose(got, plainly(query, key, value, seen, None), atol=1e-3) or num_keys == 1
