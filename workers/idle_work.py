"""Work that waits until nobody waits: compiling forwards for shapes seen or foreseen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing it loads torch, which a worker must do only after its threads are set
    from specdec.engine.async_engine import IdleWork

_QUIET_S = 0.25
"""Silence after which a worker counts as idle."""


class IdleRunner:
    """Does one piece of idle work after each quarter of a second in which no message came."""

    def __init__(self, works: Sequence[IdleWork]) -> None:
        self._works = works

    @property
    def patience_s(self) -> float | None:
        """How long to wait for a message before the worker counts as idle; None when nothing is pending."""
        return _QUIET_S if self._pending() is not None else None

    def after(self, was_served: bool) -> None:
        """Call after every wait for a message with whether one came."""
        work = None if was_served else self._pending()
        if work is not None:
            work.run_next()

    def _pending(self) -> IdleWork | None:
        return next((work for work in self._works if work.pending()), None)
