"""Work that can wait until nobody waits: compiling forwards, mostly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

WorkState = Literal["pending", "ready", "failed", "off"]
"""pending: something is left to do; ready: done; failed: given up, a log line says why; off: not wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkProgress:
    """How far some work is."""

    stage: str
    """What is being done, for people."""
    done: int
    """Pieces done."""
    total: int
    """Pieces in all, as far as is known yet."""


class IdleWork(Protocol):
    """Something useful to do while no request is present, piece by piece."""

    @property
    def state(self) -> WorkState:
        """What has become of it (any thread)."""
        ...

    def progress(self) -> WorkProgress:
        """Return how far it is."""
        ...

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


def state_of(works: Sequence[IdleWork]) -> WorkState:
    """Return the state of several works together: the one among them that asks for most attention."""
    states = {work.state for work in works}
    order: tuple[WorkState, ...] = ("pending", "failed", "off")
    return next((state for state in order if state in states), "ready")
