"""Work that waits until nobody waits: compiling forwards for shapes seen or foreseen."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

logger = logging.getLogger(__name__)

_QUIET_S = 0.25
"""Silence after which a worker counts as idle."""


class CompilesWhenIdle(Protocol):
    """A compiled forward whose shape buckets are built one at a time."""

    def pending(self) -> int:
        """Buckets left to compile."""
        ...

    def compile_next(self) -> None:
        """Compile one of them."""
        ...


class IdleWork:
    """Compiles one bucket after each quarter of a second in which no message came."""

    def __init__(self, compilers: Sequence[CompilesWhenIdle]) -> None:
        self._compilers = compilers

    @property
    def patience_s(self) -> float | None:
        """How long to wait for a message before the worker counts as idle; None when nothing is pending."""
        return _QUIET_S if self._pending() is not None else None

    def after(self, was_served: bool) -> None:
        """Call after every wait for a message with whether one came."""
        compiler = self._pending() if not was_served else None
        if compiler is not None:
            compiler.compile_next()

    def _pending(self) -> CompilesWhenIdle | None:
        return next((compiler for compiler in self._compilers if compiler.pending()), None)
