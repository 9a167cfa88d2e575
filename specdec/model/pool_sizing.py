"""How large a model's KV pool becomes: as configured, or by measuring what the largest forward takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec.core.errors import ResourceError
from specdec.kv.block_table import num_blocks_for
from specdec.kv.budget import MemoryBudget, MemoryProfile, budget_of
from specdec.kv.config import CacheConfig
from specdec.kv.host_memory import PeakMemory, available_bytes
from specdec.kv.pool import FIRST_BLOCK, KvPool, KvShape, bytes_per_block, plan_num_blocks
from specdec.model.batch import SequenceSlice
from specdec.model.loader import LoadedModel
from specdec.model.parallel.group import same_fate

logger = logging.getLogger(__name__)

_LONGEST_CONTEXT = 4096
"""Tokens that the measured forward attends to at most: what attention over more takes is bounded by its
backend, and on a CPU it would take minutes to measure."""
_SMALL_SHARE = 20
"""A pool of at most one in so many of the available bytes needs no measurement."""
_UNKNOWN = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDemand:
    """What a pool is for, and what must stay free beside it."""

    max_num_seqs: int
    """Sequences that may run at once: the pool is never larger than they can use."""
    max_num_batched_tokens: int = 512
    """Rows of the largest forward."""
    max_held_tokens: int | None = None
    """Tokens of a sequence that have K/V at the same time, at most; None: all that the model reads."""
    reserved_bytes: int = 0
    """Memory that will be taken later, by others."""
    row_bytes: int = 0
    """Taken for each token beside its K and V, with the pool and as often."""


class ForwardOnPool(Protocol):
    """A runner's eager forward, on a pool that is not its own."""

    def __call__(self, slices: Sequence[SequenceSlice], pool: KvPool) -> torch.Tensor:
        """Return logits in the model's dtype."""
        ...


def make_pool(loaded: LoadedModel, config: CacheConfig, demand: PoolDemand, forward: ForwardOnPool) -> KvPool:
    """Return the model's pool. All ranks of a model call this at the same time.

    Raises:
        ResourceError: not one block fits into the memory that is left, or what was asked for does not.
    """
    shapes = kv_shapes(loaded)
    max_tokens = demand.max_num_seqs * held_tokens(loaded, demand.max_held_tokens)
    budget: MemoryBudget | None = None
    if not (config.num_blocks or config.memory_bytes):
        budget = _measured_budget(loaded, config, demand, forward)
    with same_fate(loaded.ranks):
        num_blocks = plan_num_blocks(
            config,
            shapes,
            loaded.dtype,
            max_tokens=max_tokens,
            measured=budget,
            row_bytes=demand.row_bytes,
        )
    if loaded.ranks is not None:
        num_blocks = loaded.ranks.smallest(num_blocks)
    with same_fate(loaded.ranks):
        return _allocate(loaded, config, shapes, num_blocks, demand)


def held_tokens(loaded: LoadedModel, max_held_tokens: int | None) -> int:
    """Return how many tokens of one sequence have K/V at the same time at most."""
    longest = loaded.max_model_len
    return longest if max_held_tokens is None else min(longest, max_held_tokens)


def kv_shapes(loaded: LoadedModel) -> list[KvShape]:
    """Return the shapes of K and V of the layers that are here."""
    return [KvShape(num_kv_heads=layer.num_kv_heads, head_dim=layer.head_dim) for layer in loaded.layers]


def _allocate(
    loaded: LoadedModel,
    config: CacheConfig,
    shapes: Sequence[KvShape],
    num_blocks: int,
    demand: PoolDemand,
) -> KvPool:
    block_bytes = bytes_per_block(shapes, config.block_size, loaded.dtype)
    block_bytes += demand.row_bytes * config.block_size
    num_bytes = num_blocks * block_bytes
    what = f"a KV cache of {num_blocks} blocks takes {num_bytes >> 20} MiB"
    knobs = "cache.num_blocks, cache.memory_bytes or cache.memory_fraction"
    # A CPU's memory is taken as it is written: what does not fit would end the process hours later.
    available = available_bytes() if loaded.device.type == "cpu" else None
    if available is not None and num_bytes + demand.reserved_bytes > available:
        left = max(0, available - demand.reserved_bytes) >> 20
        raise ResourceError(f"{what}, and {left} MiB of memory are left: lower {knobs}")
    try:
        return KvPool(
            shapes,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=loaded.dtype,
            device=loaded.device,
        )
    except (torch.OutOfMemoryError, OSError) as error:
        raise ResourceError(f"{what}, which {loaded.device} does not have: lower {knobs}") from error


def _measured_budget(
    loaded: LoadedModel, config: CacheConfig, demand: PoolDemand, forward: ForwardOnPool
) -> MemoryBudget:
    ranks = loaded.ranks
    is_cpu = loaded.device.type == "cpu"
    available = available_bytes() if is_cpu else _free_device_bytes(loaded.device)
    if ranks is not None:
        smallest = ranks.smallest(_UNKNOWN if available is None else available)
        available = None if smallest == _UNKNOWN else smallest
    # Ranks on one machine take their pools from the same memory; on several, this leaves more free.
    num_sharers = 1 if ranks is None or not is_cpu else ranks.size
    max_tokens = demand.max_num_seqs * held_tokens(loaded, demand.max_held_tokens)
    needed = (bytes_per_block(kv_shapes(loaded), 1, loaded.dtype) + demand.row_bytes) * max_tokens
    is_small = available is not None and needed * _SMALL_SHARE * num_sharers <= available
    if ranks is not None:  # the forward needs all of them, and those of other layers may need more
        is_small = bool(ranks.smallest(int(is_small)))
    profile = MemoryProfile(
        device_type=loaded.device.type,
        available_bytes=available,
        forward_bytes=0 if is_small else _forward_bytes(loaded, config.block_size, demand, forward),
        reserved_bytes=demand.reserved_bytes,
        num_sharers=num_sharers,
    )
    budget = budget_of(config, profile)
    logger.info("the KV cache may take %d MiB: %s", budget.num_bytes >> 20, budget.origin)
    return budget


def _forward_bytes(loaded: LoadedModel, block_size: int, demand: PoolDemand, forward: ForwardOnPool) -> int:
    """Run the largest forward, every row of which yields logits, and return what it takes.

    Raises:
        ResourceError: the device does not have that much.
    """
    try:
        return _peak_bytes(loaded, block_size, demand, forward)
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"a forward of {demand.max_num_batched_tokens} rows does not fit {loaded.device} beside the "
            "weights: lower scheduler.max_num_batched_tokens"
        ) from error


def _peak_bytes(loaded: LoadedModel, block_size: int, demand: PoolDemand, forward: ForwardOnPool) -> int:
    device = loaded.device
    slices = _slices(demand.max_num_batched_tokens, loaded.max_model_len, block_size)
    pool = KvPool(
        kv_shapes(loaded),
        num_blocks=FIRST_BLOCK + 1,
        block_size=block_size,
        dtype=loaded.dtype,
        device=device,
    )
    if device.type != "cuda":
        with PeakMemory() as peak:
            forward(slices, pool).float()
        return peak.grown_bytes
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    forward(slices, pool).float()
    torch.cuda.synchronize(device)
    num_bytes = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return num_bytes


def _free_device_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def _slices(num_rows: int, max_model_len: int, block_size: int) -> list[SequenceSlice]:
    """Ends of long sequences, `num_rows` rows together. All share one block: its content does not matter."""
    slices: list[SequenceSlice] = []
    while num_rows > 0:
        length = min(num_rows, max_model_len)
        context = min(max_model_len, max(length, _LONGEST_CONTEXT))
        slices.append(
            SequenceSlice(
                token_ids=[0] * length,
                start=context - length,
                block_table=[FIRST_BLOCK] * num_blocks_for(context, block_size),
                num_logit_rows=length,
            )
        )
        num_rows -= length
    return slices
