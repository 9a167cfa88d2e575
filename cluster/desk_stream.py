"""One stream of a coordinator: what was asked for, what was delivered, and what it is suspected of."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.crash_policy import MAX_CRASHES, response_of
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.transport.base import PeerId


@dataclass(slots=True)
class DeskStream:
    """A request that was taken in and has not ended."""

    request: Request
    ingress: PeerId
    arrived_s: float
    generated: list[int]
    response: str
    """Its choices share what is counted here."""
    is_admitted: bool = False
    has_begun: bool = False
    """Whether the engine works on it, or is about to, as the ingress has been told."""
    num_crashes: int = 0
    """Those that the ingress knew of, and those here since."""
    losses: tuple[int, ...] = ()
    """Those here, by number."""
    num_cleared: int = 0
    awaits_turn: bool = False
    """Whether it waits to be run alone."""

    @staticmethod
    def of(request: Request, ingress: PeerId, now_s: float, *, num_cleared: int) -> DeskStream:
        """Return what an ingress has asked for now."""
        return DeskStream(
            request,
            ingress,
            now_s,
            list(request.delivered_token_ids),
            response_of(request.request_id),
            num_crashes=request.num_crashes,
            num_cleared=num_cleared,
        )

    @property
    def request_id(self) -> RequestId:
        """Of the request."""
        return self.request.request_id

    @property
    def epoch(self) -> Epoch:
        """Which attempt it is."""
        return self.request.epoch

    @property
    def attempt(self) -> tuple[RequestId, Epoch]:
        """What it is ordered by: another attempt is another order."""
        return self.request_id, self.epoch

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what the target dies of."""
        return self.num_crashes >= MAX_CRASHES

    def rest(self, now_s: float) -> Request:
        """Return what is left to do."""
        return self.request.continued(
            delivered_token_ids=tuple(self.generated), elapsed_s=now_s - self.arrived_s
        )

    def failed(self, message: str, code: str) -> RequestOutput:
        """Return its last output, where it ends here and now."""
        return failure_of(self.request, message, code, num_generated=len(self.generated))


def failure_of(
    request: Request, message: str, code: str, *, num_generated: int | None = None
) -> RequestOutput:
    """Return the last output of a request that has so many tokens (None: those that it came with)."""
    num_generated = len(request.delivered_token_ids) if num_generated is None else num_generated
    return RequestOutput(
        request_id=request.request_id,
        epoch=request.epoch,
        first_index=num_generated,
        token_ids=(),
        text="",
        finish_reason="error",
        error=message,
        error_code=code,
        num_prompt_tokens=len(request.prompt_token_ids),
        num_generated_tokens=num_generated,
    )
