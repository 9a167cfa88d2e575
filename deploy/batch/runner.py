"""Sends the requests of a batch, some at a time, and writes what comes back.

What passes (a full queue, a server that is being restarted, a broken connection) is waited out and never
becomes a result: where it does not pass, the batch ends, and goes on from there when it is run again. So it
does at once where no line could be answered (another key, another URL). A mishap (the group that served a
request was lost, say) passes, too, but a request that has one time and again may be what brings it about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

import httpx
from pydantic_core import from_json

from deploy.batch.answers import is_its_own, is_mishap, is_passing, obstacle, retry_after_s
from deploy.batch.lines import BadLine, NumberedRequest
from deploy.batch.results import BatchError, BatchResponse, BatchResult, ResultsFile, result_of_bad_line
from specdec.core.errors import DrafthouseError

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_MOST_MISHAPS = 3
"""So many mishaps of one line are waited out; the next is its result."""
Sleep = Callable[[float], Awaitable[None]]


class BatchInterrupted(DrafthouseError):
    """The server is away, or has no room, for longer than one is willing to wait; or it cannot be reached in
    this way at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How a batch is run."""

    concurrency: int
    """Requests at once."""
    patience_s: float
    """Longest time to wait for a server that is away or full, and answers no request of the batch meanwhile,
    before the batch ends."""


class BatchRunner:
    """One run over a batch."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        results: ResultsFile,
        options: BatchOptions,
        *,
        sleep: Sleep = asyncio.sleep,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """`client` has the server as its base URL, without path, and knows the API key.

        `is_gone`: whether it was in this process, and has failed for good. What it then says of requests that
        it had is no result, and nothing is waited for.
        """
        self._client = client
        self._results = results
        self._options = options
        self._sleep = sleep
        self._is_gone = is_gone
        self._num_answered = 0
        """Requests that the server has not put off."""
        self.num_completion_tokens = 0

    async def run(
        self, items: Iterable[NumberedRequest | BadLine], on_result: Callable[[BatchResult], None]
    ) -> None:
        """Write a result for every item that has none.

        Raises:
            BatchInterrupted: it cannot go on now. What is written stays.
        """
        waiting = self._without_result(items)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._options.concurrency):
                    group.create_task(self._work(waiting, on_result))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _without_result(
        self, items: Iterable[NumberedRequest | BadLine]
    ) -> Iterator[NumberedRequest | BadLine]:
        return (item for item in items if not self._results.holds(item))

    async def _work(
        self, waiting: Iterator[NumberedRequest | BadLine], on_result: Callable[[BatchResult], None]
    ) -> None:
        for item in waiting:
            result = result_of_bad_line(item) if isinstance(item, BadLine) else await self._answer(item)
            self._results.write(result)
            on_result(result)

    async def _answer(self, item: NumberedRequest) -> BatchResult:
        waited_s, next_wait_s = 0.0, _FIRST_WAIT_S
        num_answered, num_mishaps = self._num_answered, 0
        while True:
            wait_s = next_wait_s
            try:
                response = await self._client.post(item.request.url, json=item.request.body)
            except httpx.ReadTimeout:
                return _unanswered(item, "timeout", "no answer in the time that --timeout gives")
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            else:
                self._require_server(item, response)
                num_mishaps += is_mishap(response)
                if not is_passing(response) or num_mishaps > _MOST_MISHAPS:
                    self._num_answered += 1
                    return self._result(item, response)
                hint = "" if is_its_own(response) else ", not from the server itself; is the URL right?"
                reason = f"status {response.status_code}{hint}"
                wait_s = retry_after_s(response) or next_wait_s
            if self._num_answered > num_answered:  # the server is there: others got the room
                num_answered, waited_s = self._num_answered, 0.0
            if waited_s >= self._options.patience_s:
                raise BatchInterrupted(
                    f"line {item.number}: no answer for {waited_s:.0f} s ({reason}); the batch goes on from "
                    "here when it is run again (--patience waits longer)"
                )
            wait_s = min(wait_s, self._options.patience_s - waited_s)
            await self._sleep(wait_s)
            waited_s += wait_s
            next_wait_s = min(2 * next_wait_s, _LONGEST_WAIT_S)

    def _require_server(self, item: NumberedRequest, response: httpx.Response) -> None:
        """Raise BatchInterrupted for an answer that says nothing of this line, and would come for others."""
        if response.is_server_error and self._is_gone():
            raise BatchInterrupted("the engine in this process failed; the same command goes on from here")
        why = obstacle(response)
        if why is not None:
            raise BatchInterrupted(
                f"line {item.number}: {why} (the batch goes on from here when it is run again)"
            )

    def _result(self, item: NumberedRequest, response: httpx.Response) -> BatchResult:
        try:
            body = from_json(response.content)
        except ValueError:
            if response.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
                return _unanswered(
                    item, "request_too_large", "longer than what is in front of the server takes (status 413)"
                )
            return _unanswered(
                item, "not_json", f"what came is not JSON (status {response.status_code}); is the URL right?"
            )
        if isinstance(body, dict) and isinstance(body.get("usage"), dict):
            self.num_completion_tokens += int(body["usage"].get("completion_tokens") or 0)
        request_id = str(body.get("id") or "") if isinstance(body, dict) else ""
        error = _refusal(item, body) if response.is_error else None
        return BatchResult(
            id=_id(item),
            custom_id=item.request.custom_id,
            response=BatchResponse(status_code=response.status_code, request_id=request_id, body=body),
            error=error,
        )


def _refusal(item: NumberedRequest, body: object) -> BatchError:
    """Say why, and which field of which line is at fault, if one is."""
    details = body.get("error") if isinstance(body, dict) else None
    details = details if isinstance(details, dict) else {}
    message, param = str(details.get("message") or "refused"), details.get("param")
    field = f"body.{param}: " if param else ""
    return BatchError(
        code=str(details.get("code") or details.get("type") or "refused"),
        message=f"line {item.number}: {field}{message}",
    )


def _unanswered(item: NumberedRequest, code: str, reason: str) -> BatchResult:
    return BatchResult(
        id=_id(item),
        custom_id=item.request.custom_id,
        response=None,
        error=BatchError(code=code, message=f"line {item.number}: {reason}"),
    )


def _id(item: NumberedRequest) -> str:
    return f"batch_req_{item.number}"
