"""Where a stream goes whose coordinator is lost, message by message."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.desk import COORDINATOR_CRASHED, COORDINATOR_FAILED
from cluster.directory import Member
from cluster.stream_book import StreamBook
from specdec.core.clock import ManualClock
from specdec.core.errors import CapacityError, DrafthouseError
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.service import DISPLACED
from specdec.transport.base import Envelope, PeerAddress, PeerId, PeerLost
from specdec.transport.messages import Admitted, Message, OutputFrame, Pong, Refused, SubmitRequest

FULL, OTHER = PeerId("full"), PeerId("other")
REQUEST = Request(
    request_id=RequestId("r"), prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=9), seed=1
)


def member(peer_id: PeerId) -> Member:
    address = PeerAddress(peer_id=peer_id, endpoint="", public_key="")
    return Member(address=address, role="coordinator", capacity=4, model_revision="toy")


class Refusing:
    """A book with one stream that `FULL` has refused and `OTHER` has admitted."""

    def __init__(self) -> None:
        self.sent: list[tuple[PeerId, Message]] = []
        self.events: list[RequestOutput | DrafthouseError] = []
        self.book = StreamBook(
            lambda peer_id, message: self.sent.append((peer_id, message)),
            ManualClock(),
            lease_s=3.0,
            failover_timeout_s=60.0,
        )
        self.book.set_coordinators([member(FULL), member(OTHER)])
        self.book.open(REQUEST, self.events.append)
        self.hear(FULL, Refused(REQUEST.request_id, self.epoch, "capacity", "the queue is full"))
        assert self.places == [FULL, OTHER]
        self.hear(OTHER, Admitted(REQUEST.request_id, self.epoch))
        # Nonce 0: of its load, which makes the other the better choice, and nothing of streams.
        self.hear(OTHER, Pong(0, (), num_running=4))

    @property
    def submissions(self) -> list[tuple[PeerId, Request]]:
        return [(peer_id, one.request) for peer_id, one in self.sent if isinstance(one, SubmitRequest)]

    @property
    def places(self) -> list[PeerId]:
        return [peer_id for peer_id, _ in self.submissions]

    @property
    def epoch(self) -> Epoch:
        return self.submissions[-1][1].epoch

    def hear(self, sender: PeerId, message: Message | PeerLost) -> None:
        self.book.hear(Envelope(sender=sender, message=message))

    def deliver(self, first_index: int, *token_ids: int, error_code: str | None = None) -> None:
        output = RequestOutput(
            request_id=REQUEST.request_id,
            epoch=self.epoch,
            first_index=first_index,
            token_ids=token_ids,
            text="",
            finish_reason=None if error_code is None else "error",
            error=error_code,
            error_code=error_code,
            num_prompt_tokens=2,
            num_generated_tokens=first_index + len(token_ids),
        )
        self.hear(OTHER, OutputFrame((output,)))


LOSSES: dict[str, Callable[[Refusing], None]] = {
    "left": lambda streams: streams.book.set_coordinators([member(FULL)]),
    "unreachable": lambda streams: streams.hear(OTHER, PeerLost()),
    "crashed": lambda streams: streams.deliver(2, error_code=COORDINATOR_CRASHED),
    "failed": lambda streams: streams.deliver(2, error_code=COORDINATOR_FAILED),
    "lost a frame": lambda streams: streams.deliver(3, 7),
    "forgot it": lambda streams: streams.hear(OTHER, Pong(1000, (), num_running=4)),
    "has no target": lambda streams: streams.hear(OTHER, Pong(0, (), num_running=4, without_target=True)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_stream_goes_on_where_there_was_no_room_for_it_before(loss: str) -> None:
    streams = Refusing()
    streams.deliver(0, 5, 6)
    LOSSES[loss](streams)
    assert streams.places == [FULL, OTHER, FULL]
    assert streams.submissions[-1][1].delivered_token_ids == (5, 6)
    assert len(streams.events) == 1


def test_what_has_to_leave_a_queue_does_not_go_back_to_a_full_one() -> None:
    streams = Refusing()
    streams.deliver(0, error_code=DISPLACED)
    assert streams.places == [FULL, OTHER]
    (refusal,) = streams.events
    assert isinstance(refusal, CapacityError)
