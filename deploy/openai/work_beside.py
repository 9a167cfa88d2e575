"""Work of a door that would hold up its event loop for long: done in a thread, one piece at a time.

In that loop everything else waits: other streams, and the signs of life without which target groups take the
door for gone and drop its streams. Beside it the work takes turns with the loop for the interpreter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class WorkBeside:
    """A thread, for one event loop. It begins with the first piece."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")

    async def do(self, work: Callable[..., T], *arguments: object) -> T:
        """Return what `work` returns, once it is done. Who is cancelled meanwhile does not wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
