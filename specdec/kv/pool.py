"""The memory of a paged KV cache: K and V of every layer, in blocks.

Shape letters: N blocks, G key/value heads, P block size (tokens), D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.core.errors import ResourceError
from specdec.core.plan import SlotMove
from specdec.kv.budget import MemoryBudget
from specdec.kv.config import CacheConfig
from specdec.kv.huge_pages import huge_zeros

FIRST_BLOCK = 1
"""Block 0 is scratch: padding rows write there. Allocators hand out blocks 1 .. N - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Shape of one layer's cache entries."""

    num_kv_heads: int
    head_dim: int


class KvPool:
    """K and V of every layer, each [N, G, P, D], zero at the start."""

    def __init__(
        self,
        shapes: Sequence[KvShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert num_blocks > FIRST_BLOCK, "a pool needs a block beside the scratch block"
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Layers of one shape are one tensor, so that a block of all of them is copied in one operation.
        self.stacks: list[torch.Tensor] = []
        """K and V of the layers of one shape after the other, each [2 * layers, N, G, P, D]."""
        keys: dict[int, torch.Tensor] = {}
        values: dict[int, torch.Tensor] = {}
        for shape in dict.fromkeys(shapes):
            layers = [layer for layer, its in enumerate(shapes) if its == shape]
            size = (2 * len(layers), num_blocks, shape.num_kv_heads, block_size, shape.head_dim)
            stack = _zeros(size, dtype, device)
            self.stacks.append(stack)
            keys.update(zip(layers, stack[: len(layers)], strict=True))
            values.update(zip(layers, stack[len(layers) :], strict=True))
        self.keys = tuple(keys[layer] for layer in range(len(shapes)))
        self.values = tuple(values[layer] for layer in range(len(shapes)))

    @property
    def num_bytes(self) -> int:
        """Memory of all K and V."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy K and V of all layers from block `sources[i]` to block `destinations[i]`, on the device.

        The two lists do not overlap.
        """
        device = self.keys[0].device
        source_index = torch.tensor(sources, dtype=torch.long, device=device)
        destination_index = torch.tensor(destinations, dtype=torch.long, device=device)
        for stack in self.stacks:
            stack.index_copy_(1, destination_index, stack.index_select(1, source_index))

    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """Move K and V of all layers from slot to slot, on the device; all are read before any is written.

        No slot is a destination twice.
        """
        size, device = self.block_size, self.keys[0].device
        sources, destinations = torch.tensor(moves, dtype=torch.long, device=device).T
        for stack in self.stacks:
            moved = stack[:, sources // size, :, sources % size]
            stack[:, destinations // size, :, destinations % size] = moved


def _zeros(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return huge_zeros(size, dtype)
    return torch.zeros(tuple(size), dtype=dtype, device=device)


def bytes_per_block(shapes: Sequence[KvShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of K and V of all layers in one block."""
    entries = sum(shape.num_kv_heads * shape.head_dim for shape in shapes)
    return 2 * entries * block_size * dtype.itemsize


def plan_num_blocks(
    config: CacheConfig,
    shapes: Sequence[KvShape],
    dtype: torch.dtype,
    *,
    max_tokens: int,
    measured: MemoryBudget | None = None,
    row_bytes: int = 0,
) -> int:
    """Return how many blocks (scratch included) the pool shall have.

    `config.num_blocks` if given; else what `config.memory_bytes`, or else the budget `measured`, holds, but
    no more than `max_tokens` (the sum over all sequences that may run at once) need. `row_bytes` are taken
    for each token beside its K and V.

    Raises:
        ResourceError: the memory does not hold one usable block.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    block_bytes = bytes_per_block(shapes, config.block_size, dtype) + row_bytes * config.block_size
    budget = measured
    if config.memory_bytes is not None:
        budget = MemoryBudget(num_bytes=config.memory_bytes, origin="cache.memory_bytes")
    assert budget is not None, "without a size in the configuration, it has to be measured"
    affordable = budget.num_bytes // block_bytes
    if affordable <= FIRST_BLOCK:
        raise ResourceError(
            f"not one request fits: the KV cache gets {budget.num_bytes} bytes ({budget.origin}), which "
            f"hold {affordable} blocks of {block_bytes} bytes; at least {FIRST_BLOCK + 1} are needed (one is "
            f"scratch)"
        )
    return min(affordable, FIRST_BLOCK - (-max_tokens // config.block_size))
