"""The outputs of all choices of one HTTP request as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self

from deploy.openai.errors import request_timeout
from deploy.openai.keys import Usage
from deploy.openai.metrics import ChoiceTimer, DoorMetrics
from specdec.core.errors import RequestFailed
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.engine.service import GRAMMAR_FAILED, INVALID_GRAMMAR, GenerationService

_GRAMMAR_CODES = frozenset({INVALID_GRAMMAR, GRAMMAR_FAILED})
_BUFFERED_OUTPUTS = 64
"""Outputs that may wait for a slow client before its choices wait for it."""

_GRACE_S = 0.5
"""The engine ends a request whose time is up and says how far it came; this long the door waits for that."""


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
    ) -> None:
        self._service = service
        self._requests = requests
        self._metrics = metrics
        self._usage = usage
        self._timeout_s = timeout_s
        self._deadline_s: float | None = None
        self._queue: asyncio.Queue[tuple[int, RequestOutput] | Exception] = asyncio.Queue(_BUFFERED_OUTPUTS)
        self._tasks: list[asyncio.Task[None]] = []
        self._num_unfinished = len(requests)

    async def __aenter__(self) -> Self:
        self._usage.__enter__()
        if self._timeout_s is not None:
            self._deadline_s = asyncio.get_running_loop().time() + self._timeout_s + _GRACE_S
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
        if self._num_unfinished == 0:
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

    async def _next(self) -> tuple[int, RequestOutput] | Exception:
        try:
            async with asyncio.timeout_at(self._deadline_s):
                return await self._queue.get()
        except TimeoutError:
            raise request_timeout(f"The request took longer than {self._timeout_s:g} s.") from None

    async def _pump(self, index: int, request: Request) -> None:
        """Move one choice's outputs to the queue; abort the choice if that ends early."""
        timer = ChoiceTimer(self._metrics)
        outputs = self._service.generate(request)
        is_finished = False
        try:
            async for output in outputs:
                timer.observe(output)
                self._usage.charge(len(output.token_ids))
                is_finished = output.finish_reason is not None
                await self._queue.put((index, output))
                if is_finished:
                    return
            raise RequestFailed("The request ended without a result.", code="request_lost")
        except Exception as error:  # noqa: BLE001 - handed to whoever iterates, who decides what it means
            is_finished = True
            await self._queue.put(error)
        finally:
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()
            if not is_finished:
                self._metrics.aborted.inc()
                await self._service.abort(request.request_id)


def _failure(output: RequestOutput, request: Request) -> RequestFailed:
    grammar = request.params.grammar
    return RequestFailed(
        output.error or "The request was aborted by the server.",
        code=output.error_code or f"request_{output.finish_reason}",
        param=grammar.param if grammar is not None and output.error_code in _GRAMMAR_CODES else None,
    )
