"""The contract of whatever runs the target model: in this process, or behind a channel."""

from __future__ import annotations

from typing import Protocol

from specdec.core.description import TargetDescription
from specdec.core.plan import TargetResult, TargetStep

__all__ = ["Target", "TargetDescription"]


class Target(Protocol):
    """Runs rounds. Steps are answered in the order submitted; one may be in flight while another is built."""

    @property
    def description(self) -> TargetDescription:
        """Constant over the life of the target."""
        ...

    @property
    def is_elsewhere(self) -> bool:
        """Whether rounds run while this thread does something else, not in `collect`."""
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
