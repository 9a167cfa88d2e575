"""Time that passes only when everybody sleeps: runs are exact, and take no time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer. Nothing in it may do input or output."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 1000.0

    def time(self) -> float:
        return self._virtual_s

    def _run_once(self) -> None:
        if not self._ready:
            timers = [timer for timer in self._scheduled if not timer.cancelled()]
            assert timers, "everybody waits, and nobody will ever come"
            self._virtual_s = max(self._virtual_s, min(timer.when() for timer in timers))
        super()._run_once()


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
