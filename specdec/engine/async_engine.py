"""An engine behind an asyncio face: rounds run in a thread of their own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import TypeVarTuple

import msgspec

from specdec.core.clock import MonotonicClock
from specdec.core.description import TargetDescription
from specdec.core.error_codes import ENGINE_FAILED, SHUTTING_DOWN
from specdec.core.errors import ChannelClosed, DrafthouseError
from specdec.core.idle_work import IdleWork
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.engine.engine import Engine
from specdec.engine.metrics.status import StatusKeeper
from specdec.engine.text.text_stream import Finish
from specdec.kv.selection import WrittenBudget
from specdec.transport.status import ServiceStatus

__all__ = ["AsyncEngine", "IdleWork"]

logger = logging.getLogger(__name__)

_SHUTDOWN = Finish(reason="error", error="the server is shutting down", error_code=SHUTTING_DOWN)
_QUIET_S = 0.2
"""How long no request must have been present before idle work begins: it cannot be interrupted."""

StreamKey = tuple[RequestId, Epoch]
Arguments = TypeVarTuple("Arguments")


class _Stream:
    """The consumer's end of one request."""

    __slots__ = ("_loop", "_outputs", "key", "num_delivered")

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.key: StreamKey = (request.request_id, request.epoch)
        self.num_delivered = len(request.delivered_token_ids)
        self._loop = loop
        self._outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The consumer's event loop."""
        return self._loop

    def put(self, output: RequestOutput) -> None:
        """Hand an output over; in the consumer's loop only."""
        self._outputs.put_nowait(output)

    async def get(self) -> RequestOutput:
        """Wait for the next output."""
        return await self._outputs.get()


class AsyncEngine:
    """Implements `GenerationService` on an `Engine`, which it owns from then on.

        service = AsyncEngine(Engine(config))
        async for output in service.generate(request):
            ...
        service.close()

    Each round wakes each event loop once, however many streams it serves.
    """

    def __init__(self, engine: Engine, *, idle_work: Sequence[IdleWork] | None = None) -> None:
        """Start the engine's thread.

        Args:
            engine: used by that thread alone from now on.
            idle_work: done in this order while no request has been present for a moment; None: the engine's.
        """
        self._engine = engine
        self._idle_work = engine.idle_work if idle_work is None else tuple(idle_work)
        self._status = StatusKeeper(MonotonicClock(), max_num_running=engine.max_num_seqs)
        self._commands: deque[Callable[[], None]] = deque()
        self._takes_commands = True
        self._lock = threading.Lock()
        """Held to add a command, and to say that no more are taken."""
        self._wake = threading.Event()
        self._streams: dict[StreamKey, _Stream] = {}
        self._stopping = False
        self._ready = True
        self._was_busy = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def description(self) -> TargetDescription | None:
        """Facts about the target; None once it is lost or the engine closed."""
        return self._engine.description if self._ready and not self._engine.is_lost else None

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Yield the request's outputs; see `GenerationService`."""
        stream = _Stream(request, asyncio.get_running_loop())
        is_open = True
        try:
            await self._submit(request, stream)
            while is_open:
                output = await stream.get()
                is_open = output.finish_reason is None
                yield output
        finally:
            if is_open:
                self._post(partial(self._leave, stream))

    async def abort(self, request_id: RequestId) -> None:
        """End a request early; its stream ends with finish reason "abort"."""
        self._post(partial(self._abort, request_id))

    async def recall(self, names: Sequence[str], proof: bytes) -> Sequence[tuple[str, tuple[int, ...]]]:
        """Return nothing: what ends with this process has no other to come back to."""
        return ()

    async def metrics(self) -> Mapping[str, float]:
        """Return current counters and gauges."""
        return {**self._engine.metrics().snapshot(), **self._engine.draft_counters}

    async def status(self) -> ServiceStatus:
        """Return one target group, in this process."""
        group = self._status.take(self._engine.metrics(), self._engine.draft_counters)
        ready = self.description() is not None
        return ServiceStatus(target_groups=(msgspec.structs.replace(group, is_serving=ready),))

    def set_kv_budget(self, budget: WrittenBudget) -> None:
        """Change how much drafts attend to, from the next round on; see `Engine.set_kv_budget` (any thread).

        Raises:
            ConfigError: as that.
        """
        self._engine.set_kv_budget(budget)

    def close(self) -> None:
        """End every live request with its last output, stop the thread, close the engine. Idempotent."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    async def _submit(self, request: Request, stream: _Stream) -> None:
        accepted: asyncio.Future[None] = stream.loop.create_future()
        if not self._post(partial(self._accept, request, stream, accepted)):
            raise ChannelClosed("the engine is closed")
        await accepted

    def _post(self, command: Callable[[], None]) -> bool:
        """Have the engine's thread run a command; False when it takes no more."""
        with self._lock:
            if not self._takes_commands:
                return False
            self._commands.append(command)
        self._wake.set()
        return True

    # From here on everything runs in the engine's thread.

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_commands()
                if self._engine.has_work:
                    self._deliver(self._engine.step())
                    self._was_busy = True
                else:
                    self._idle()
            self._engine.end_all(_SHUTDOWN)
            self._deliver(self._engine.step())
        except Exception as error:
            # The border of the thread: whoever waits for a stream would never hear of it otherwise.
            logger.exception("the engine failed")
            self._ready = False  # before its streams hear of it, and ask whether it is still there
            self._fail(error)
        finally:
            self._ready = False
            self._stopping = True
            with self._lock:
                self._takes_commands = False
            self._run_commands()
            self._engine.close()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _idle(self) -> None:
        """Wait for a command; when none comes for a while, do a piece of idle work."""
        work = next((work for work in self._idle_work if work.pending()), None)
        if work is None:
            self._wake.wait()
            self._wake.clear()
        elif self._wake.wait(_QUIET_S if self._was_busy else 0.0):
            self._wake.clear()
        else:
            self._was_busy = False
            work.run_next()

    def _accept(self, request: Request, stream: _Stream, accepted: asyncio.Future[None]) -> None:
        try:
            if self._stopping:
                raise ChannelClosed("the engine is closed")
            self._engine.add_request(request)
        except DrafthouseError as refusal:
            _call_soon(stream.loop, _settle, accepted, refusal)
            return
        self._streams[stream.key] = stream
        _call_soon(stream.loop, _settle, accepted, None)

    def _abort(self, request_id: RequestId, epoch: Epoch | None = None) -> None:
        if not self._stopping:
            self._engine.abort(request_id, epoch)

    def _leave(self, stream: _Stream) -> None:
        """The consumer has gone."""
        if self._streams.get(stream.key) is stream:
            del self._streams[stream.key]
            self._abort(*stream.key)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = defaultdict(
            list
        )
        for output in outputs:
            key = (output.request_id, output.epoch)
            stream = self._streams.get(key) if output.finish_reason is None else self._streams.pop(key, None)
            if stream is not None:
                stream.num_delivered += len(output.token_ids)
                by_loop[stream.loop].append((stream, output))
        for loop, deliveries in by_loop.items():
            if not _call_soon(loop, _hand_over, deliveries):
                for stream, _ in deliveries:
                    self._leave(stream)

    def _fail(self, error: Exception) -> None:
        """End every stream without the engine's help."""
        for stream in self._streams.values():
            request_id, epoch = stream.key
            last = RequestOutput(
                request_id=request_id,
                epoch=epoch,
                first_index=stream.num_delivered,
                token_ids=(),
                text="",
                finish_reason="error",
                error=f"the engine failed: {type(error).__name__}",
                error_code=ENGINE_FAILED,
                num_generated_tokens=stream.num_delivered,
            )
            _call_soon(stream.loop, stream.put, last)
        self._streams.clear()


def _call_soon(
    loop: asyncio.AbstractEventLoop, callback: Callable[[*Arguments], None], *args: *Arguments
) -> bool:
    """Call `callback` in a loop of another thread; False when that loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        if loop.is_closed():
            return False
        raise
    return True


def _settle(future: asyncio.Future[None], error: DrafthouseError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _hand_over(deliveries: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in deliveries:
        stream.put(output)
