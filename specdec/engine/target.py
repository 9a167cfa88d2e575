"""The contract of whatever runs the target model: in this process, or behind a channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specdec.core.plan import TargetResult, TargetStep


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDescription:
    """Facts about a loaded target that schedulers and doors need."""

    model_id: str
    revision: str
    """Hash over config and weights: replay is only allowed onto the same one."""
    dtype: str
    vocab_size: int
    max_model_len: int
    """Longest sequence, prompt and output together, in tokens."""
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int


class Target(Protocol):
    """Runs rounds. Steps are answered in the order submitted; one may be in flight while another is built."""

    @property
    def description(self) -> TargetDescription:
        """Constant over the life of the target."""
        ...

    def submit(self, step: TargetStep) -> None:
        """Start a round. Does not wait for it."""
        ...

    def collect(self) -> TargetResult:
        """Wait for the answer to the oldest submitted round.

        Raises:
            TransportError: the target cannot be reached any more.
        """
        ...

    def close(self) -> None:
        """Free all resources. Idempotent."""
        ...
