"""Configuration of a paged KV cache."""

from __future__ import annotations

from pydantic import Field

from specdec.core.config import StrictConfig


class CacheConfig(StrictConfig):
    """Size and shape of the block pool."""

    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens per block."""
    num_blocks: int | None = Field(default=None, ge=2)
    """Blocks in the pool; None: as many as `memory_bytes` holds, at most what max_num_seqs sequences of
    full length need."""
    memory_bytes: int = Field(default=1 << 30, ge=1 << 16)
    """Bytes for K and V of all layers, when `num_blocks` is not given."""
    enable_prefix_caching: bool = True
    """Keep K/V of finished requests, and let requests that begin with the same tokens use them, until the
    memory is needed. Blocks in use by requests are never kept from them."""
