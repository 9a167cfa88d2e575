"""Compares a backend with the portable reference on the device it is going to run on.

For backends that are not ours: whatever version of a library is installed, on whatever device, it is looked
at before it serves anybody. It also makes the library compile its kernels at start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.attention.base import AttentionBackend, LayerAttention
from specdec.attention.metadata import build_metadata
from specdec.attention.sdpa import SdpaAttention

LARGEST_DIFFERENCE = 0.05
"""Norm of a row's difference over the row's norm. Rounding in bf16 stays below a third of it; a wrong
scale, layout or mask lies above."""

_BLOCK_SIZE = 16
_SHAPES = ((1, 70), (5, 300), (40, 3), (1, 0))
"""(rows, tokens cached before them) of each sequence: decoding, verifying, a chunk, a first token."""
_LONGEST_WINDOW = 2048
"""Windows up to it are left by one more sequence."""
_SHARPNESS = 3.0
"""Factor on queries: rows then look at few keys each, and a wrong one among them shows."""


@dataclass(frozen=True, slots=True)
class _Slice:
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    parents: None = None


@torch.inference_mode()
def largest_difference(
    backend: AttentionBackend, layer: LayerAttention, *, dtype: torch.dtype, device: torch.device
) -> float:
    """Return how far the worst row of one batch is from the reference's, relative to its norm.

    The batch is always the same; NaN where either side is not finite.
    """
    shapes = list(_SHAPES)
    if layer.sliding_window is not None and layer.sliding_window <= _LONGEST_WINDOW:
        shapes.append((3, layer.sliding_window + 20))
    slices, num_blocks = _slices(shapes)
    metadata = build_metadata(slices, block_size=_BLOCK_SIZE, device=device)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    pool = (num_blocks, layer.num_kv_heads, _BLOCK_SIZE, layer.head_dim)
    keys, values = normal(*pool), normal(*pool)
    num_rows, head_dim = metadata.num_rows, layer.head_dim
    query = normal(num_rows, layer.num_heads, head_dim) * _SHARPNESS
    key, value = (normal(num_rows, layer.num_kv_heads, head_dim) for _ in range(2))
    rows = []
    for each in (backend, SdpaAttention()):
        output = each.attend(
            query,
            key,
            value,
            key_cache=keys.clone(),
            value_cache=values.clone(),
            metadata=metadata,
            plan=each.begin(metadata),
            layer=layer,
        )
        rows.append(output.float().flatten(1))
    own, expected = rows
    return float(((own - expected).norm(dim=1) / expected.norm(dim=1)).max())


def _slices(shapes: Sequence[tuple[int, int]]) -> tuple[list[_Slice], int]:
    """Slices whose blocks lie in falling order, one sequence between the other, and the pool's size."""
    counts = [-(-(rows + start) // _BLOCK_SIZE) for rows, start in shapes]
    order = sorted(
        ((place, number) for number, count in enumerate(counts) for place in range(count)), reverse=True
    )
    tables: list[list[int]] = [[] for _ in shapes]
    for block, (_, number) in enumerate(order, start=1):
        tables[number].insert(0, block)
    slices = [_Slice([0] * rows, start, table) for (rows, start), table in zip(shapes, tables, strict=True)]
    return slices, 1 + len(order)
