"""Starting the first replica of a deployment that has none: Serve does so for a call that waits for one.

The first call by a handle looks Serve's controller up, and waits for Ray's head, which may be away for a
minute. So calls are made in threads of their own. While Serve starts it, it asks no policy how many there
should be, so whoever calls tells, and tells again as long as nobody comes (`wanted.tell_woken`): nobody would
miss one that finds no place.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.config import DraftPoolConfig

logger = logging.getLogger(__name__)

_AGAIN_S = 60.0
"""A call that has brought nothing is made anew after so long: it may have been lost."""
_TELL_AGAIN_S = 5.0
"""That a call is not answered yet is told again after so long: a policy's last word may have come in behind
it, or nobody have been there to hear it."""
_FAILURES = (RayError, RayServeException, ValueError)
"""The last: Ray's head knows of no controller, as while it begins anew."""


class PoolWaker:
    """Wakes the draft pool when a coordinator has work and there is no draft worker.

    For the coordinator's channel thread, in which nothing may wait.
    """

    def __init__(self, pool: Any, config: DraftPoolConfig, tell: Callable[[], None]) -> None:
        """`pool` is the deployment's handle; `tell` says that it was called, and may wait for Ray's head."""
        scaling = config.autoscaling
        self._pool = pool if scaling is not None and scaling.min_workers == 0 else None
        self._tell = tell
        self._call: Any = None
        self._called_s = -_AGAIN_S
        self._calling: threading.Thread | None = None

    def consider(self, *, is_needed: bool) -> None:
        """Look whether to call; waits neither for an answer nor for Ray."""
        if self._pool is None or not is_needed or time.monotonic() < self._called_s + _AGAIN_S:
            return
        if self._calling is not None and self._calling.is_alive():
            return
        self._called_s = time.monotonic()
        self._calling = threading.Thread(target=self._wake, args=(self._pool,), name="wake-pool", daemon=True)
        self._calling.start()

    def _wake(self, pool: Any) -> None:
        if self._call is not None:
            self._call.cancel()
        try:
            self._call = pool.wake.remote()
            self._tell()
        except _FAILURES as error:
            logger.warning("the draft pool could not be woken: %s", error)


def waker_of(coordinators: Any, tell: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    """Return what wakes the target groups and waits until there is one.

    Args:
        coordinators: their handle.
        tell: says that it was called, and again as long as there is none; it may wait for Ray's head.
    """

    async def wake() -> None:
        try:
            answer = asyncio.ensure_future(await asyncio.to_thread(coordinators.wake.remote))
            try:
                await asyncio.to_thread(tell)
                while not (await asyncio.wait([answer], timeout=_TELL_AGAIN_S))[0]:
                    await asyncio.to_thread(tell)
                await answer
            finally:
                answer.cancel()
        except _FAILURES as error:
            logger.warning("the target groups could not be woken: %s", error)

    return wake
