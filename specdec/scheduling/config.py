"""Configuration of the scheduler."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from specdec.core.config import StrictConfig


class SchedulerConfig(StrictConfig):
    """How many requests and tokens enter one round, and how many may wait."""

    max_num_seqs: int = Field(default=64, ge=1, le=4096)
    """Most sequences in one round."""
    max_num_batched_tokens: int = Field(default=512, ge=1)
    """Most rows (prefill, decode and draft tokens together) in one round; longer prompts go in chunks."""
    max_num_waiting: int = Field(default=1024, ge=0)
    """Most requests in the queue; beyond it one is refused with 429: the newcomer, or in its place the last
    in the queue, where that is less urgent or of an API key that has more waiting."""
    refuse_late: bool = True
    """Refuse a request at once with 429 that, as fast as requests are served lately, would have its first
    token after `slo.ttft_ms` or be incomplete after its timeout."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence takes at least one row of each round"
            )
        return self
