"""The contract between doors (HTTP, command line) and whatever generates: in process or a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from specdec.core.ids import RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.engine.targets.target import TargetDescription
from specdec.transport.status import ServiceStatus


class GenerationService(Protocol):
    """Turns requests into streams of outputs."""

    def description(self) -> TargetDescription | None:
        """Facts about the loaded target; None while none is ready (the door answers 503)."""
        ...

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Yield the request's outputs; the last one, and only it, has a finish reason.

        Closing the iterator early aborts the request and frees its memory within a round.

        Raises:
            CapacityError: before the first output, when the queue is full.
            NotReadyError: before the first output, when no model is there to take the request.
            InputError: before the first output, when the request does not fit this target.
        """
        ...

    async def abort(self, request_id: RequestId) -> None:
        """End a request early. Unknown ids are ignored."""
        ...

    async def recall(self, names: Sequence[str], proof: bytes) -> Sequence[tuple[str, tuple[int, ...]]]:
        """Return tokens generated so far of streams whose client has come back (`core.request.Resumption`).

        Once per attempt at a stream that is still known; nothing for those that are not: by the token
        function they may be generated again.
        """
        ...

    async def metrics(self) -> Mapping[str, float]:
        """Current counters and gauges, by metric name without prefix."""
        ...

    async def status(self) -> ServiceStatus:
        """What it is doing and why, for people."""
        ...
