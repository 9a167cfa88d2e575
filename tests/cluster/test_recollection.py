"""What coordinators remember for clients that come back: bounded, and for nobody else."""

from __future__ import annotations

import msgspec

from cluster.desk import RequestDesk
from cluster.recollection import FailedResponses, Recollection
from specdec.core.clock import ManualClock
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import FinishReason, RequestOutput
from specdec.core.request import Request, Resumption
from specdec.core.sampling_params import SamplingParams
from specdec.transport.base import Envelope, PeerId
from specdec.transport.messages import Abort, Message, Recall, Recalled, SubmitRequest

LEASE_S = 3.0


def known_by(name: str, proof: bytes = b"mine", window_s: float = 60.0) -> Resumption:
    return Resumption(name=name, proof=proof, window_s=window_s)


def test_streams_are_forgotten_when_their_window_is_over() -> None:
    clock = ManualClock()
    recollection = Recollection(clock)
    recollection.keep(known_by("short", window_s=5.0), [1, 2])
    recollection.keep(known_by("long"), [3])
    clock.advance(4.9)
    assert recollection.recall("short", b"mine") == (1, 2)
    clock.advance(0.2)
    assert recollection.recall("short", b"mine") is None
    assert recollection.recall("long", b"mine") == (3,)
    assert recollection.num_tokens == 1


def test_what_clients_of_a_silent_door_have_is_kept_until_they_hear_of_it() -> None:
    """A hung door's connections break when Serve has found it out: a minute and a half later, by default."""
    clock = ManualClock()
    recollection = Recollection(clock)
    known = msgspec.structs.replace(known_by("a"), replay_window_s=360.0)
    recollection.keep(known, [5, 6], is_door_silent=True)
    recollection.keep(msgspec.structs.replace(known, name="b"), [7])
    clock.advance(95.0)
    assert recollection.recall("a", b"mine") == (5, 6)
    assert recollection.recall("b", b"mine") is None, "its client has left, or has all of it"
    clock.advance(300.0)
    assert recollection.recall("a", b"mine") is None


def test_only_who_has_the_proof_is_told() -> None:
    recollection = Recollection(ManualClock())
    recollection.keep(known_by("a"), [1])
    assert recollection.recall("a", b"other") is None
    # Nor can another stream of that name take its place.
    recollection.keep(known_by("a", proof=b"other"), [9, 9])
    assert recollection.recall("a", b"mine") == (1,)


def test_the_longest_attempt_is_kept() -> None:
    recollection = Recollection(ManualClock())
    for tokens in ([1, 2], [1, 2, 3, 4], [1]):
        recollection.keep(known_by("a"), tokens)
    assert recollection.recall("a", b"mine") == (1, 2, 3, 4)
    assert recollection.num_tokens == 4


def test_memory_is_bounded_and_the_oldest_go_first() -> None:
    recollection = Recollection(ManualClock(), max_tokens=10)
    for number in range(100):
        recollection.keep(known_by(str(number)), [number] * 4)
        assert recollection.num_tokens <= 10
    assert [recollection.recall(str(n), b"mine") is not None for n in (97, 98, 99)] == [False, True, True]
    recollection.keep(known_by("huge"), range(11))
    assert recollection.num_tokens == 0


def test_what_killed_who_served_it_is_known_for_as_long_as_it_could_be_generated_again() -> None:
    clock = ManualClock()
    failed = FailedResponses(clock)
    failed.keep(Resumption(name="cmpl-ab-0", proof=b"mine", window_s=60.0, replay_window_s=360.0))
    failed.keep(known_by("cmpl-cd-0"))
    clock.advance(61)
    others = FailedResponses(clock)
    for resumption in failed.kept():
        others.keep(resumption)
    for one in (failed, others):
        assert one.has("cmpl-ab-1", b"mine")
        assert not one.has("cmpl-cd-0", b"mine")
    clock.advance(300)
    assert not failed.has("cmpl-ab-0", b"mine")
    assert not others.has("cmpl-ab-0", b"mine")


class Desk:
    """A desk, what it has sent, and an engine that does nothing."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.sent: list[tuple[PeerId, Message]] = []
        self.desk = RequestDesk(
            lambda to, message: self.sent.append((to, message)), self.clock, lease_s=LEASE_S
        )

    def add_request(self, request: Request) -> None:
        """Part of `StreamEngine`."""

    def abort(self, request_id: RequestId, epoch: Epoch) -> None:
        """Part of `StreamEngine`."""

    def submit(self, name: str, ingress: str = "door", resumption: Resumption | None = None) -> None:
        request = Request(
            request_id=RequestId(name),
            prompt_token_ids=(1,),
            params=SamplingParams(),
            seed=1,
            delivered_token_ids=(10,),
            resumption=resumption,
        )
        self.hear(ingress, SubmitRequest(request))
        self.desk.serve(self)

    def hear(self, sender: str, message: Message) -> None:
        self.desk.hear(Envelope(sender=PeerId(sender), message=message))

    def deliver(self, name: str, index: int, *token_ids: int, finish: FinishReason | None = None) -> None:
        self.desk.deliver(
            [
                RequestOutput(
                    request_id=RequestId(name),
                    epoch=Epoch(0),
                    first_index=index,
                    token_ids=token_ids,
                    text="",
                    finish_reason=finish,
                )
            ]
        )

    def recall(self, *names: str, proof: bytes = b"mine") -> dict[str, tuple[int, ...]]:
        self.sent.clear()
        self.hear("other-door", Recall(7, names, proof))
        ((receiver, message),) = self.sent
        assert receiver == "other-door"
        assert isinstance(message, Recalled)
        assert message.nonce == 7
        return dict(message.streams)


def test_another_ingress_is_told_of_streams_that_run_ended_or_were_left() -> None:
    desk = Desk()
    for name in ("runs", "ends", "left"):
        desk.submit(f"{name}-0", resumption=known_by(name))
        desk.deliver(f"{name}-0", 1, 11, 12)
    desk.deliver("ends-0", 3, 13, finish="stop")
    desk.hear("door", Abort(RequestId("left-0"), Epoch(0)))
    assert desk.desk.num_streams == 1, "who leaves holds nothing but its tokens"
    assert desk.recall("runs", "ends", "left", "unknown") == {
        "runs": (10, 11, 12),
        "ends": (10, 11, 12, 13),
        "left": (10, 11, 12),
    }
    assert desk.recall("runs", "ends", "left", proof=b"other") == {}
    desk.clock.advance(61)
    desk.hear("door", Recall(1, (), b""))  # it is still there
    desk.desk.tick()
    assert desk.recall("runs", "ends", "left") == {"runs": (10, 11, 12)}


def test_streams_of_a_dead_ingress_are_remembered_though_they_are_stopped() -> None:
    desk = Desk()
    desk.submit("a-0", resumption=known_by("a"))
    desk.submit("b-0")
    for name in ("a-0", "b-0"):
        desk.deliver(name, 1, 11)
    for _ in range(3):
        desk.clock.advance(LEASE_S / 2)
        desk.desk.tick()
    assert desk.desk.num_streams == 0
    assert desk.recall("a", "b", "b-0") == {"a": (10, 11)}
