"""Configuration of a paged KV cache."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from specdec.core.config import StrictConfig


class CacheConfig(StrictConfig):
    """Size and shape of the block pool."""

    block_size: int = Field(default=16, ge=1, le=256)
    """Tokens per block."""
    num_blocks: int | None = Field(default=None, ge=2)
    """Blocks in the pool; None: as many as the memory below holds, at most what max_num_seqs sequences of
    full length need."""
    memory_bytes: int | None = Field(default=None, ge=1 << 16)
    """Bytes for K and V of all layers; None: what `memory_fraction` says."""
    memory_fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of the memory that is left beside the weights and the largest forward, which is measured at
    start. None: 0.9 of a GPU's; on a CPU, whose memory others use too, 0.5 and at most 4 GiB."""
    enable_prefix_caching: bool = True
    """Keep K/V of finished requests, and let requests that begin with the same tokens use them, until the
    memory is needed. Blocks in use by requests are never kept from them."""

    @property
    def is_sized(self) -> bool:
        """Whether anything here says how large the pool is."""
        return not (self.num_blocks is None and self.memory_bytes is None and self.memory_fraction is None)

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [
            name
            for name in ("num_blocks", "memory_bytes", "memory_fraction")
            if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise ValueError(f"give one of {' and '.join(given)}, not both")
        return self
