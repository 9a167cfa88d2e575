"""The outputs of all choices of one HTTP request as one stream."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import TracebackType
from typing import Self

from deploy.openai.errors import took_too_long
from deploy.openai.keys import Usage
from deploy.openai.metrics import ChoiceTimer, DoorMetrics
from deploy.openai.settings import DEFAULT_MAX_UNREAD_OUTPUTS
from deploy.openai.tracing import RequestTrace
from specdec.core.error_codes import DISPLACED, GRAMMAR_FAILED, INVALID_GRAMMAR
from specdec.core.errors import CapacityError, RequestFailed
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.engine.service import GenerationService

_GRAMMAR_CODES = frozenset({INVALID_GRAMMAR, GRAMMAR_FAILED})
SLOW_READER = "slow_reader"
"""Error code of a stream whose client left too much of it unread."""
_RETRY_AFTER_S = 1.0
GRACE_S = 0.5
"""The engine ends a request whose time is up and says how far it came; this long the door waits for that."""
_MAX_TURNS = 20
"""Of the event loop, in which a reader that waits for nobody is back, also from the first delivery."""


class ChoiceOutputs:
    """Iterates over (choice index, output) of all choices, in order of arrival.

    Use it as an async context manager: entering it raises where the API key is at its limits, leaving it
    aborts whatever has not finished. A choice that fails fails the request: the iterator raises.
    """

    def __init__(
        self,
        service: GenerationService,
        requests: Sequence[Request],
        metrics: DoorMetrics,
        usage: Usage,
        *,
        timeout_s: float | None,
        limit_s: float | None = None,
        max_unread: int = DEFAULT_MAX_UNREAD_OUTPUTS,
        trace: RequestTrace | None = None,
        arrived_s: float | None = None,
    ) -> None:
        """`max_unread` outputs of each choice may wait to be taken; with more the request fails.

        `timeout_s` is what is left of the time that the client was promised, `limit_s` (None: all of it).
        `arrived_s`: when the request came, by the clock of the event loop; None: when this is entered.
        """
        self._service = service
        self._requests = requests
        self._metrics = metrics
        self._usage = usage
        self._timeout_s = timeout_s
        self._limit_s = timeout_s if limit_s is None else limit_s
        self._trace = trace
        self._arrived_s = arrived_s
        self._deadline_s: float | None = None
        self._max_unread = max_unread * len(requests)
        self._queue: asyncio.Queue[tuple[int, RequestOutput] | Exception] = asyncio.Queue()
        """At most so many outputs, and what ended each choice."""
        self._is_pressing = asyncio.Event()
        """What waits is to be taken at once: a choice has ended, or much of it waits."""
        self._has_come = asyncio.Event()
        """Something waits to be taken."""
        self._timers: list[ChoiceTimer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._num_unfinished = len(requests)

    async def __aenter__(self) -> Self:
        self._usage.__enter__()
        now_s = asyncio.get_running_loop().time()
        if self._timeout_s is not None:
            self._deadline_s = now_s + self._timeout_s + GRACE_S
        waited_s = 0.0 if self._arrived_s is None else now_s - self._arrived_s
        self._timers = [ChoiceTimer(self._metrics, waited_s) for _ in self._requests]
        self._tasks = [
            asyncio.create_task(self._pump(index, request)) for index, request in enumerate(self._requests)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._usage.__exit__(kind, error, traceback)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, RequestOutput]:
        """Return the next output of any choice.

        Raises:
            CapacityError, InputError, RequestFailed, TransportError: a choice was refused or failed.
            ApiError: the request took longer than it may.
        """
        if self.is_complete:
            raise StopAsyncIteration
        item = await self._next()
        if isinstance(item, Exception):
            raise item
        index, output = item
        if output.finish_reason in ("error", "abort"):
            raise _failure(output, self._requests[index])
        if output.finish_reason is not None:
            self._num_unfinished -= 1
        return item

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to be taken."""
        return not self._queue.empty()

    @property
    def is_complete(self) -> bool:
        """Whether every choice has finished."""
        return self._num_unfinished == 0

    def note_delivery(self, taken: Iterable[tuple[int, RequestOutput]]) -> None:
        """Count what the client gets now, all of it at once; times are those that it sees.

        Whoever iterates calls it: when an output has come says little where several are delivered together.
        """
        of_choices: dict[int, list[RequestOutput]] = {}
        for index, output in taken:
            of_choices.setdefault(index, []).append(output)
        for index, outputs in of_choices.items():
            self._timers[index].observe(*outputs)

    async def is_silent(self, until_s: float) -> bool:
        """Wait for something to be taken, until then (by the loop's clock); return whether nothing has come.

        False at once where the request's time is up by then: whoever iterates waits no longer than that.
        """
        deadline_s = math.inf if self._deadline_s is None else self._deadline_s
        if self.is_waiting or deadline_s <= until_s:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self._has_come.wait()
        return not self.is_waiting

    async def gather(self, seconds: float) -> None:
        """Let outputs come together for so long; less where a choice ends, or much waits."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._is_pressing.wait()

    async def _next(self) -> tuple[int, RequestOutput] | Exception:
        try:
            async with asyncio.timeout_at(self._deadline_s):
                item = await self._queue.get()
        except TimeoutError:
            raise took_too_long(self._limit_s) from None
        if self._queue.empty():
            self._is_pressing.clear()
            self._has_come.clear()
        return item

    def _put(self, item: tuple[int, RequestOutput] | Exception, *, is_last: bool) -> None:
        self._queue.put_nowait(item)
        self._has_come.set()
        if is_last or self._queue.qsize() >= self._max_unread // 2:
            self._is_pressing.set()

    async def _pump(self, index: int, request: Request) -> None:
        """Move one choice's outputs to the queue; abort the choice if that ends early."""
        outputs = self._service.generate(request)
        is_finished = False
        try:
            async for output in outputs:
                self._usage.charge(len(output.token_ids))
                if self._queue.qsize() >= self._max_unread and not await self._makes_room():
                    self._put(self._not_read(), is_last=True)
                    return
                is_finished = output.finish_reason is not None
                if is_finished and self._trace is not None:
                    self._trace.note_choice(index, output)
                self._put((index, output), is_last=is_finished)
                if is_finished:
                    return
            raise RequestFailed("The request ended without a result.", code="request_lost")
        except Exception as error:  # noqa: BLE001 - handed to whoever iterates, who decides what it means
            is_finished = True
            self._put(error, is_last=True)
        finally:
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()
            if not is_finished:
                self._metrics.aborted.inc()
                await self._service.abort(request.request_id)

    async def _makes_room(self) -> bool:
        """Whether the reader takes something, once it has its turn.

        After a stall, more than may wait is there at once, and it has had no turn to take any of it.
        """
        for _ in range(_MAX_TURNS):
            await asyncio.sleep(0)
            if self._queue.qsize() < self._max_unread:
                return True
        return False

    def _not_read(self) -> RequestFailed:
        self._metrics.slow_readers.inc()
        return RequestFailed(
            f"The client did not read: {self._max_unread} deliveries waited for it.", code=SLOW_READER
        )


def _failure(output: RequestOutput, request: Request) -> RequestFailed | CapacityError:
    if output.error_code == DISPLACED:
        wait_s = output.retry_after_s or _RETRY_AFTER_S
        return CapacityError(output.error or "the queue is full", retry_after_s=wait_s)
    grammar = request.params.grammar
    return RequestFailed(
        output.error or "The request was aborted by the server.",
        code=output.error_code or f"request_{output.finish_reason}",
        param=grammar.param if grammar is not None and output.error_code in _GRAMMAR_CODES else None,
    )
