"""Where a stream goes whose coordinator is lost, and when it is to blame for that, message by message."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from cluster.crash_policy import PROBATION_OUTPUTS
from cluster.directory import Member
from cluster.stream_book import StreamBook
from specdec.core.clock import ManualClock
from specdec.core.error_codes import (
    COORDINATOR_CRASHED,
    COORDINATOR_FAILED,
    COORDINATOR_LOST,
    DISPLACED,
    FAILED_REPEATEDLY,
)
from specdec.core.errors import CapacityError, DrafthouseError, InputError, LateError, RequestFailed
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request, Resumption
from specdec.core.sampling_params import SamplingParams
from specdec.transport.base import Envelope, PeerAddress, PeerId, PeerLost
from specdec.transport.messages import (
    Admitted,
    Hello,
    Message,
    OutputFrame,
    Ping,
    Pong,
    Refused,
    SubmitRequest,
)

FULL, OTHER = PeerId("full"), PeerId("other")
REQUEST = Request(
    request_id=RequestId("r"), prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=9), seed=1
)


def member(peer_id: PeerId) -> Member:
    address = PeerAddress(peer_id=peer_id, endpoint="", public_key="")
    return Member(address=address, role="coordinator", capacity=4, model_revision="toy")


class Refusing:
    """A book with one stream that `FULL` has refused, and `OTHER` has, and has admitted."""

    def __init__(self, *, is_admitted: bool = True) -> None:
        self.sent: list[tuple[PeerId, Message]] = []
        self.events: list[RequestOutput | DrafthouseError] = []
        self.clock = ManualClock()
        self.book = StreamBook(
            lambda peer_id, message: self.sent.append((peer_id, message)),
            self.clock,
            lease_s=3.0,
            failover_timeout_s=60.0,
        )
        self.book.set_coordinators([member(FULL), member(OTHER)])
        self.book.open(REQUEST, self.events.append)
        self.hear(FULL, Refused(REQUEST.request_id, self.epoch, "capacity", "the queue is full"))
        assert self.places == [FULL, OTHER]
        if is_admitted:
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


@pytest.mark.parametrize("loss", ["left", "unreachable", "lost a frame", "forgot it"])
def test_a_stream_that_nobody_has_taken_in_asks_again_after_a_loss(loss: str) -> None:
    """Where there was no room a while ago there may be some; if not, its client is told so at once."""
    streams = Refusing(is_admitted=False)
    LOSSES[loss](streams)
    assert streams.places == [FULL, OTHER, FULL]
    streams.hear(FULL, Refused(REQUEST.request_id, streams.epoch, "capacity", "the queue is full"))
    if streams.events:
        (refusal,) = streams.events
        assert isinstance(refusal, CapacityError)
    else:
        assert streams.places[3:] == [OTHER], "which is there, and may take it now"


def test_a_stream_that_nobody_has_taken_in_does_not_wait_for_a_target_beside_another_one() -> None:
    streams = Refusing(is_admitted=False)
    for _ in range(2):
        LOSSES["has no target"](streams)
        assert streams.places == [FULL, OTHER], "who has just refused it is not asked again at once"
        streams.clock.advance(1.1)
    LOSSES["has no target"](streams)
    assert streams.places == [FULL, OTHER, FULL]


def test_what_has_to_leave_a_queue_does_not_go_back_to_a_full_one() -> None:
    streams = Refusing()
    streams.deliver(0, error_code=DISPLACED)
    assert streams.places == [FULL, OTHER]
    (refusal,) = streams.events
    assert isinstance(refusal, CapacityError)


def test_refusals_are_no_end_of_waiting() -> None:
    """Those of coordinators of another version, say, which take in no more than their queue holds."""
    streams = Refusing()
    streams.deliver(0, 5, 6)
    streams.hear(OTHER, PeerLost())
    for _ in range(70):
        epoch = streams.epoch
        streams.hear(FULL, Refused(REQUEST.request_id, epoch, "capacity", "full", retry_after_s=3.0))
        streams.clock.advance(1.0)
        streams.hear(FULL, Pong(0, (), num_running=4))
        streams.book.tick()
    assert len(streams.submissions) > 10
    last = streams.events[-1]
    assert isinstance(last, RequestOutput)
    assert last.error_code == COORDINATOR_LOST


@pytest.mark.parametrize("param", ["prompt", "stop_token_ids", "max_tokens"])
def test_a_request_that_cannot_be_sent_is_refused_at_once(param: str) -> None:
    """Who only sends it would wait for ever: it is lost on the way, and resubmitted, again and again."""
    changes = {
        "prompt": msgspec.structs.replace(REQUEST, prompt_token_ids=(70_000,) * 20_000),
        "stop_token_ids": msgspec.structs.replace(
            REQUEST, params=SamplingParams(max_tokens=9, stop_token_ids=(70_000,) * 20_000)
        ),
        "max_tokens": msgspec.structs.replace(REQUEST, params=SamplingParams(max_tokens=20_000)),
    }
    sent: list[Message] = []
    book = StreamBook(
        lambda _, message: sent.append(message),
        ManualClock(),
        lease_s=3.0,
        failover_timeout_s=60.0,
        max_message_bytes=1 << 16,
    )
    book.set_coordinators([member(OTHER)])
    with pytest.raises(InputError, match=r"cluster\.channels\.max_message_bytes"):
        book.open(changes[param], lambda event: None)
    assert book.num_streams == 0
    assert not any(isinstance(message, SubmitRequest) for message in sent)
    book.open(REQUEST, lambda event: None)
    assert any(isinstance(message, SubmitRequest) for message in sent)


def test_who_takes_a_stream_over_hears_that_it_was_taken_in() -> None:
    streams = Refusing()
    assert [request.was_admitted for _, request in streams.submissions] == [False, False]
    LOSSES["unreachable"](streams)
    assert [request.was_admitted for _, request in streams.submissions] == [False, False, True]


A, B, C = (PeerId(name) for name in "abc")
LEASE_S = 3.0


class Cluster:
    """A book with one stream, and what coordinators say."""

    def __init__(self, request: Request | None = REQUEST, **options: bool | int) -> None:
        self.sent: list[tuple[PeerId, Message]] = []
        self.events: list[RequestOutput | DrafthouseError] = []
        self.clock = ManualClock()
        self.book = StreamBook(
            lambda peer_id, message: self.sent.append((peer_id, message)),
            self.clock,
            lease_s=LEASE_S,
            failover_timeout_s=60.0,
            may_be_none=bool(options.get("may_be_none")),
            max_groups=options.get("max_groups", 1),
        )
        self.book.set_coordinators([member(A), member(B), member(C)])
        if request is not None:
            self.book.open(request, self.events.append)

    @property
    def submissions(self) -> list[tuple[PeerId, SubmitRequest]]:
        return [(peer_id, one) for peer_id, one in self.sent if isinstance(one, SubmitRequest)]

    @property
    def place(self) -> PeerId:
        return self.submissions[-1][0]

    @property
    def num_crashes(self) -> int:
        return self.submissions[-1][1].request.num_crashes

    @property
    def epoch(self) -> Epoch:
        return self.submissions[-1][1].request.epoch

    @property
    def code(self) -> str | None:
        (event,) = self.events
        assert isinstance(event, RequestOutput)
        return event.error_code

    def hear(self, sender: PeerId, message: Message | PeerLost) -> None:
        self.book.hear(Envelope(sender=sender, message=message))

    def admit(
        self, *, has_begun: bool = True, is_alone: bool | None = False, losses: tuple[int, ...] = ()
    ) -> None:
        self.hear(self.place, Admitted(REQUEST.request_id, self.epoch, has_begun, is_alone, losses))

    def lose_link(self) -> PeerId:
        lost = self.place
        self.hear(lost, PeerLost())
        return lost

    def answer(self, sender: PeerId) -> None:
        """It answers the next ping."""
        self.book.tick()
        nonce = max(one.nonce for _, one in self.sent if isinstance(one, Ping))
        self.hear(sender, Pong(nonce, ((REQUEST.request_id, self.epoch),) if sender == self.place else ()))

    def run_alone(self) -> PeerId:
        """Two coordinators are silent; return who runs it alone."""
        for _ in range(2):
            self.admit()
            self.lose_link()
        self.admit(is_alone=True)
        return self.place


def test_what_runs_alone_is_to_blame_when_nobody_is_heard_again() -> None:
    cluster = Cluster()
    cluster.book.tick()
    last = cluster.run_alone()
    assert cluster.num_crashes == 2
    cluster.lose_link()
    num_submissions = len(cluster.submissions)
    cluster.clock.advance(LEASE_S / 2)
    cluster.book.tick()
    assert cluster.events == []
    assert len(cluster.submissions) == num_submissions, "nobody else gets it before that is clear"
    cluster.hear(last, Pong(1, ()))  # to the ping before
    cluster.clock.advance(LEASE_S / 2)
    cluster.book.tick()
    assert cluster.code == FAILED_REPEATEDLY


def test_what_runs_alone_is_not_to_blame_for_a_link_that_broke() -> None:
    cluster = Cluster()
    last = cluster.run_alone()
    cluster.lose_link()
    cluster.answer(last)
    assert cluster.events == []
    assert cluster.place == last
    assert cluster.num_crashes == 2, "of the others nothing was heard"
    cluster.clock.advance(10 * LEASE_S)
    assert cluster.events == []


def test_a_link_that_breaks_again_after_its_first_break_was_forgiven_is_no_crash_either() -> None:
    cluster = Cluster()
    third = cluster.run_alone()
    first, _, _ = (peer_id for peer_id, _ in cluster.submissions)
    cluster.hear(third, Admitted(REQUEST.request_id, cluster.epoch, True, False, (), 1))
    cluster.book.tick()
    fourth = PeerId("fourth")
    cluster.book.set_coordinators([member(third), member(fourth)])
    assert cluster.lose_link() == third
    assert cluster.place == fourth
    cluster.hear(fourth, Admitted(REQUEST.request_id, cluster.epoch, True, False, (), 1))
    cluster.book.set_coordinators([member(fourth), member(first)])
    cluster.hear(first, Pong(0, ()))
    assert cluster.lose_link() == fourth
    assert (cluster.place, cluster.num_crashes) == (first, 2)
    cluster.hear(first, Admitted(REQUEST.request_id, cluster.epoch, True, True, (), 1))
    cluster.lose_link()
    cluster.clock.advance(LEASE_S / 2)
    cluster.answer(first)
    assert cluster.place == first
    assert cluster.submissions[-1][1].request.epoch == cluster.epoch
    num_submissions = len(cluster.submissions)
    cluster.clock.advance(LEASE_S)
    cluster.book.tick()
    assert cluster.events == []
    assert len(cluster.submissions) == num_submissions


def test_who_is_heard_again_is_taken_off_the_account_of_who_runs_elsewhere() -> None:
    cluster = Cluster()
    cluster.admit()
    first = cluster.lose_link()
    cluster.admit()
    cluster.lose_link()
    before = cluster.epoch
    cluster.answer(first)
    assert (cluster.num_crashes, cluster.epoch) == (1, before), "the same attempt, told anew"


def test_what_says_itself_that_it_fails_is_not_taken_off_by_living_on() -> None:
    cluster = Cluster()
    for _ in range(2):
        cluster.admit()
        failed = cluster.place
        output = RequestOutput(
            request_id=REQUEST.request_id,
            epoch=cluster.epoch,
            first_index=0,
            token_ids=(),
            text="",
            finish_reason="error",
            error_code=COORDINATOR_CRASHED,
        )
        cluster.hear(failed, Pong(0, (), draining=True))
        cluster.hear(failed, OutputFrame((output,)))
        cluster.answer(failed)
    assert cluster.num_crashes == 2


def test_losses_of_targets_and_of_coordinators_add_up() -> None:
    cluster = Cluster()
    cluster.admit(has_begun=False, losses=(1,))
    cluster.admit(has_begun=True, losses=(1,))
    cluster.lose_link()
    assert cluster.num_crashes == 2


def test_what_waits_is_suspected_for_nothing() -> None:
    cluster = Cluster()
    for _ in range(2):
        cluster.admit(has_begun=False)
        cluster.lose_link()
    assert cluster.num_crashes == 0


def test_a_loss_that_was_told_of_is_not_counted_again_with_who_told() -> None:
    """Its coordinator cannot bring the target back, or dies while it tries."""
    cluster = Cluster()
    cluster.admit(has_begun=False, losses=(1,))
    cluster.hear(cluster.place, Pong(0, (), without_target=True))
    assert cluster.num_crashes == 1


def test_coordinators_that_say_nothing_of_it_are_understood() -> None:
    """Of an older version: what they took in has begun, and suspects run alone for eight outputs."""
    cluster = Cluster()
    for _ in range(2):
        cluster.admit(is_alone=None)
        cluster.hear(cluster.place, Pong(0, (), without_target=True))
    assert cluster.num_crashes == 2
    cluster.admit(is_alone=None)
    for index in range(PROBATION_OUTPUTS):
        output = RequestOutput(
            request_id=REQUEST.request_id, epoch=cluster.epoch, first_index=index, token_ids=(5,), text=""
        )
        cluster.hear(cluster.place, OutputFrame((output,)))
    cluster.lose_link()
    assert cluster.num_crashes == 1
    assert cluster.submissions[-1][1].num_cleared == 1


@pytest.mark.parametrize("waits_s", [(30.0, 5.0, 20.0), (5.0, 30.0, 20.0), (30.0, 20.0, 5.0)])
def test_who_is_refused_everywhere_is_told_the_shortest_wait(waits_s: tuple[float, ...]) -> None:
    cluster = Cluster()
    for wait_s in waits_s:
        refusal = Refused(REQUEST.request_id, cluster.epoch, "capacity", "full", retry_after_s=wait_s)
        cluster.hear(cluster.place, refusal)
    (error,) = cluster.events
    assert isinstance(error, CapacityError)
    assert error.retry_after_s == 5.0


@pytest.mark.parametrize("hold_s", [(0.03, 0.01, 0.02), (0.01, 0.03, 0.02), (0.0, 0.03, 0.02)])
@pytest.mark.parametrize("waits_s", [(30.0, 5.0, 20.0), (5.0, 30.0, 20.0)])
def test_a_refusal_holds_until_the_first_of_them_could_take_it(
    hold_s: tuple[float, ...], waits_s: tuple[float, ...]
) -> None:
    cluster = Cluster()
    for holds_s, wait_s in zip(hold_s, waits_s, strict=True):
        refusal = Refused(
            REQUEST.request_id, cluster.epoch, "late", "late", retry_after_s=wait_s, holds_s=holds_s
        )
        cluster.hear(cluster.place, refusal)
    (error,) = cluster.events
    assert isinstance(error, LateError)
    assert (error.retry_after_s, error.holds_s) == (5.0, min(hold_s))


def named(name: str, **fields: object) -> Request:
    return msgspec.structs.replace(REQUEST, request_id=RequestId(name), **fields)


def test_no_more_wait_for_a_coordinator_than_would_be_taken_in() -> None:
    cluster = Cluster(None, may_be_none=True, max_groups=2)
    cluster.hear(A, Pong(0, (), max_streams=3))
    cluster.book.set_coordinators([])
    for number in range(6):
        cluster.book.open(named(f"r{number}"), cluster.events.append)
    with pytest.raises(CapacityError) as refusal:
        cluster.book.open(named("r6"), cluster.events.append)
    assert refusal.value.retry_after_s > 0
    cluster.book.open(named("begun", delivered_token_ids=(1,)), cluster.events.append)
    cluster.book.close(RequestId("r0"))
    cluster.book.close(RequestId("r1"))
    cluster.book.open(named("r7"), cluster.events.append)
    cluster.book.set_coordinators([member(A)])
    assert len(cluster.submissions) == 6
    cluster.book.open(named("r8"), cluster.events.append)
    assert cluster.events == [], "where somebody is, he decides"


def test_coordinators_that_do_not_say_how_many_they_take_set_no_bound() -> None:
    cluster = Cluster(None, may_be_none=True)
    cluster.hear(A, Pong(0, ()))
    cluster.book.set_coordinators([])
    for number in range(50):
        cluster.book.open(named(f"r{number}"), cluster.events.append)
    assert cluster.book.num_homeless == 50


def test_what_has_failed_is_refused_when_its_client_comes_back_and_others_are_told() -> None:
    resumption = Resumption(name="cmpl-ab-0", proof=b"mine", window_s=60.0)
    cluster = Cluster(msgspec.structs.replace(REQUEST, resumption=resumption))
    cluster.run_alone()
    cluster.lose_link()
    cluster.clock.advance(LEASE_S)
    cluster.book.tick()
    assert cluster.code == FAILED_REPEATEDLY
    assert {peer_id for peer_id, one in cluster.sent if one == Hello(0, (resumption,))} == {A, B, C}
    again = named("cmpl-ab-1~ab", resumption=msgspec.structs.replace(resumption, name="cmpl-ab-1"))
    with pytest.raises(RequestFailed) as failure:
        cluster.book.open(again, cluster.events.append)
    assert failure.value.code == FAILED_REPEATEDLY
    cluster.sent.clear()
    cluster.book.set_coordinators([member(PeerId("new"))])
    assert cluster.sent == [(PeerId("new"), Hello(0, (resumption,)))]
    other = msgspec.structs.replace(resumption, proof=b"other")
    cluster.book.open(named("another", resumption=other), cluster.events.append)
    cluster.clock.advance(61.0)
    assert not cluster.book.has_failed(["cmpl-ab-0"], b"mine")


def test_a_door_that_stood_still_blames_no_coordinator_for_that() -> None:
    cluster = Cluster()
    cluster.book.tick()
    cluster.admit()
    place = cluster.place
    for standstill_s in (0.8 * LEASE_S, 10 * LEASE_S):
        cluster.clock.advance(standstill_s)
        cluster.book.tick()
        assert set(cluster.book.coordinators) == {A, B, C}
        for peer_id in (A, B, C):
            cluster.answer(peer_id)
    assert cluster.place == place
    for _ in range(7):
        cluster.clock.advance(0.5)
        cluster.answer(place)
    assert cluster.book.coordinators == (place,), "who says nothing while it could be heard is gone"
