"""Starting the first replica of a deployment that has none: Serve does so for a call that waits for one."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.config import DraftPoolConfig

logger = logging.getLogger(__name__)

_AGAIN_S = 60.0
"""A call that has brought nothing is made anew after so long: it may have been lost."""


class PoolWaker:
    """Wakes the draft pool when a coordinator has work and there is no draft worker. One thread."""

    def __init__(self, pool: Any, config: DraftPoolConfig) -> None:
        """`pool` is the deployment's handle."""
        scaling = config.autoscaling
        self._pool = pool if scaling is not None and scaling.min_workers == 0 else None
        self._call: Any = None
        self._called_s = -_AGAIN_S

    def consider(self, *, is_needed: bool) -> None:
        """Look whether to call; does not wait for an answer."""
        if self._pool is None or not is_needed or time.monotonic() < self._called_s + _AGAIN_S:
            return
        self._called_s = time.monotonic()
        if self._call is not None:
            self._call.cancel()
        try:
            self._call = self._pool.wake.remote()
        except (RayError, RayServeException) as error:
            logger.warning("the draft pool could not be woken: %s", error)


def waker_of(coordinators: Any) -> Callable[[], Awaitable[None]]:
    """Return what wakes the target groups and waits until there is one. `coordinators` is their handle."""

    async def wake() -> None:
        try:
            await coordinators.wake.remote()
        except (RayError, RayServeException) as error:
            logger.warning("the target groups could not be woken: %s", error)

    return wake
