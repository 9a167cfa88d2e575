"""Work that can wait until nobody waits: compiling forwards, mostly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class IdleWork(Protocol):
    """Something useful to do while no request is present, piece by piece."""

    def pending(self) -> bool:
        """Return whether anything is left to do."""
        ...

    def run_next(self) -> None:
        """Do the next piece. It cannot be interrupted, so it should be short."""
        ...


@runtime_checkable
class HasIdleWork(Protocol):
    """A target or proposer that runs faster once its idle work is done."""

    @property
    def idle_work(self) -> Sequence[IdleWork]:
        """What there is to do; constant over its life."""
        ...


def idle_work_of(*parts: object) -> tuple[IdleWork, ...]:
    """Return the idle work of those parts that have any."""
    return tuple(work for part in parts if isinstance(part, HasIdleWork) for work in part.idle_work)
