"""What a desk sends: everything once, in frames that fit, however long the log-probabilities are.

And whom it runs alone, what it says of that, and what it lets wait meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from cluster.crash_policy import MAX_CLEARED, PROBATION_OUTPUTS
from cluster.desk import RequestDesk
from specdec.core.clock import ManualClock
from specdec.core.error_codes import FAILED_REPEATEDLY, OUTPUT_TOO_LARGE, TARGET_LOST
from specdec.core.errors import CapacityError
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import FinishReason, RequestOutput, RequestStats, TokenLogprobs
from specdec.core.request import Request, Resumption
from specdec.core.sampling_params import MAX_LOGPROBS, SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyModel, ToyTarget, ToyTokenizer
from specdec.proposers.none import NoProposer
from specdec.transport.base import Envelope, PeerId
from specdec.transport.messages import (
    Admitted,
    Hello,
    Message,
    OutputFrame,
    Ping,
    Recall,
    Recalled,
    Refused,
    StatusQuery,
    StatusReply,
    SubmitRequest,
    encode,
)
from specdec.transport.status import TargetGroupStatus

VOCAB = 9
MODEL = ToyModel(VOCAB, seed=3)
INGRESS = PeerId("ingress")
MAX_BYTES = 1 << 16
SCORES = TokenLogprobs(5, -0.5, tuple((token_id, -0.5 - token_id) for token_id in range(MAX_LOGPROBS)))


class NotingEngine:
    """Takes everything, and remembers what it was told to end."""

    has_work = False

    def __init__(self) -> None:
        self.aborted: list[tuple[RequestId, Epoch]] = []

    def add_request(self, request: Request) -> None:
        pass

    def abort(self, request_id: RequestId, epoch: Epoch) -> None:
        self.aborted.append((request_id, epoch))


class Bench:
    """A desk, and the outputs of the frames that it has sent."""

    def __init__(self, max_message_bytes: int = MAX_BYTES) -> None:
        self.max_message_bytes = max_message_bytes
        self.frames: list[list[RequestOutput]] = []
        self.desk = RequestDesk(self.send, ManualClock(), lease_s=60.0, max_message_bytes=max_message_bytes)

    def send(self, peer_id: PeerId, message: Message) -> None:
        assert len(encode(message)) <= self.max_message_bytes
        if isinstance(message, OutputFrame):
            self.frames.append(list(message.outputs))

    def submit(self, *requests: Request) -> None:
        for one in requests:
            self.desk.hear(Envelope(sender=INGRESS, message=SubmitRequest(one)))

    @property
    def outputs(self) -> list[RequestOutput]:
        return [output for frame in self.frames for output in frame]


def request(name: str, params: SamplingParams | None = None, prompt: Sequence[int] = (1, 2, 3)) -> Request:
    return Request(
        request_id=RequestId(name), prompt_token_ids=tuple(prompt), params=params or SamplingParams(), seed=1
    )


def output(
    name: str, num_scored: int = 0, *, first_index: int = 0, finish_reason: FinishReason | None = None
) -> RequestOutput:
    return RequestOutput(
        request_id=RequestId(name),
        epoch=Epoch(0),
        first_index=first_index,
        token_ids=(5,),
        text="a",
        prompt_logprobs=(SCORES,) * num_scored or None,
        finish_reason=finish_reason,
        num_generated_tokens=first_index + 1,
    )


def opened(names: Sequence[str]) -> tuple[Bench, NotingEngine]:
    bench, engine = Bench(), NotingEngine()
    bench.submit(*map(request, names))
    bench.desk.serve(engine)
    return bench, engine


def test_a_round_is_one_frame() -> None:
    bench, _ = opened("abc")
    bench.desk.deliver([output("a", 10), output("b"), output("c", 10)])
    assert [len(frame) for frame in bench.frames] == [3]


def test_a_round_with_more_than_a_frame_holds_is_divided() -> None:
    bench, engine = opened("abcdef")
    round_ = [output("a"), *(output(name, 120) for name in "bcde"), output("f", finish_reason="stop")]
    bench.desk.deliver(round_)
    assert bench.outputs == round_
    assert len(bench.frames) > 1
    bench.desk.serve(engine)
    assert engine.aborted == []


def test_what_fills_a_frame_goes_alone() -> None:
    """Its bound is above a frame's, its length is not."""
    bench, _ = opened("abc")
    round_ = [output("a"), output("b", 250), output("c")]
    bench.desk.deliver(round_)
    assert bench.frames == [[one] for one in round_]


@pytest.mark.parametrize("finish_reason", [None, "length"])
def test_an_output_that_no_frame_holds_ends_its_request_alone(finish_reason: FinishReason | None) -> None:
    bench, engine = opened("abc")
    bench.desk.deliver([output("a"), output("b", 400, finish_reason=finish_reason), output("c")])
    first, failed, last = bench.outputs
    assert (first, last) == (output("a"), output("c"))
    assert (failed.request_id, failed.finish_reason, failed.error_code) == ("b", "error", OUTPUT_TOO_LARGE)
    assert (failed.first_index, failed.token_ids, failed.prompt_logprobs) == (0, (), None)
    assert failed.error is not None
    assert "prompt_logprobs" in failed.error
    assert "echo" in failed.error
    bench.desk.serve(engine)
    assert engine.aborted == [("b", Epoch(0))]
    bench.frames.clear()
    bench.desk.deliver([output("b", first_index=1, finish_reason="abort"), output("a", first_index=1)])
    assert bench.outputs == [output("a", first_index=1)]
    assert bench.desk.num_streams == 2


def test_the_engine_is_rid_of_a_request_whose_output_is_too_large() -> None:
    bench = Bench(4096)
    engine = Engine.from_parts(
        target=ToyTarget(MODEL, num_blocks=48),
        proposer=NoProposer(),
        tokenizer=ToyTokenizer.of_letters(VOCAB),
    )
    params = SamplingParams(max_tokens=20)
    scored = SamplingParams(max_tokens=2000, prompt_logprobs=VOCAB - 1)
    small, big = request("small", params), request("big", scored, (1, 2, 3) * 20)
    bench.submit(small, big)
    bench.desk.serve(engine)
    for _ in range(40):
        bench.desk.deliver(engine.step())
        bench.desk.serve(engine)
    assert not engine.has_work
    ends = {one.request_id: one.error_code for one in bench.outputs if one.finish_reason is not None}
    assert ends == {"small": None, "big": OUTPUT_TOO_LARGE}
    assert [one.error_code for one in bench.outputs if one.request_id == "big"] == [OUTPUT_TOO_LARGE]
    tokens = [token_id for one in bench.outputs if one.request_id == "small" for token_id in one.token_ids]
    assert tokens == MODEL.continuation(small.prompt_token_ids, params, small.seed, 20)


TOY = ToyTarget(MODEL).description
RESUMPTION = Resumption(name="cmpl-ab-0", proof=b"mine", window_s=60.0)


class Crashing:
    """A desk of a target that is lost when the test says so, and what an engine was given since."""

    def __init__(self, most_without_target: int = 1000) -> None:
        self.sent: list[Message] = []
        self.clock = ManualClock()
        self.desk = RequestDesk(
            lambda peer_id, message: self.sent.append(message),
            self.clock,
            lease_s=60.0,
            most_without_target=most_without_target,
        )
        self.desk.set_target(TOY)
        self.has_work = False
        self.is_full = False
        self.given: list[str] = []
        self.aborted: list[tuple[str, int]] = []
        self.epochs: dict[str, int] = {}

    def add_request(self, request: Request) -> None:
        if self.is_full:
            raise CapacityError("full", retry_after_s=1.0, holds_s=0.02)
        self.given.append(request.request_id)

    def abort(self, request_id: RequestId, epoch: Epoch) -> None:
        self.aborted.append((request_id, epoch))

    def submit(self, *requests: Request, num_cleared: int = 0) -> None:
        for one in requests:
            self.desk.hear(Envelope(sender=INGRESS, message=SubmitRequest(one, num_cleared)))
        self.desk.serve(self)

    def generate(self, name: str, num_outputs: int) -> None:
        for index in range(num_outputs):
            self.desk.deliver([output(name, first_index=index)])

    def lose_target(self, *names: str, waiting: Sequence[str] = ()) -> None:
        outputs = [self._lost(name, first_scheduled_s=1.0) for name in names]
        assert self.desk.deliver([*outputs, *(self._lost(name) for name in waiting)])
        self.given.clear()
        self.desk.begin_replay()
        self.desk.serve(self)

    def _lost(self, name: str, first_scheduled_s: float | None = None) -> RequestOutput:
        return msgspec.structs.replace(
            output(name, finish_reason="error"),
            token_ids=(),
            error_code=TARGET_LOST,
            stats=RequestStats(arrival_s=0.0, first_scheduled_s=first_scheduled_s),
        )

    def told(self, name: str) -> Admitted:
        """What its ingress was told last."""
        return [one for one in self.sent if isinstance(one, Admitted) and one.request_id == name][-1]

    def codes(self, name: str) -> list[str | None]:
        frames = [one for one in self.sent if isinstance(one, OutputFrame)]
        return [one.error_code for frame in frames for one in frame.outputs if one.request_id == name]

    @property
    def refused(self) -> list[str]:
        return [one.request_id for one in self.sent if isinstance(one, Refused)]


def test_an_ingress_is_told_of_each_loss_and_of_who_begins() -> None:
    bench = Crashing()
    bench.submit(request("runs"), request("waits"))
    assert bench.told("runs") == Admitted(RequestId("runs"), Epoch(0), has_begun=False, is_alone=False)
    bench.desk.note_begun([RequestId("runs")])
    assert bench.told("runs").has_begun
    assert not bench.told("waits").has_begun
    bench.lose_target("runs", waiting=["waits"])
    assert bench.told("runs") == Admitted(RequestId("runs"), Epoch(0), False, False, (1,))
    assert bench.told("waits").losses == ()
    bench.lose_target("runs", waiting=["waits"])
    assert bench.told("runs") == Admitted(RequestId("runs"), Epoch(0), True, True, (1, 2))
    assert bench.given == ["runs"], "alone means alone"
    bench.generate("runs", PROBATION_OUTPUTS)
    assert bench.told("runs") == Admitted(RequestId("runs"), Epoch(0), True, False, (1, 2), 1)
    bench.desk.serve(bench)
    assert bench.given == ["runs", "waits"]


def test_who_never_ran_is_never_to_blame() -> None:
    bench = Crashing()
    bench.submit(request("waits"))
    for _ in range(5):
        bench.lose_target(waiting=["waits"])
        assert bench.given == ["waits"]
        assert not bench.told("waits").is_alone
    assert bench.codes("waits") == []


def test_choices_at_one_desk_share_a_loss() -> None:
    bench = Crashing()
    bench.submit(request("cmpl-a-0"), request("cmpl-a-1"), request("cmpl-b-0"))
    bench.lose_target("cmpl-a-0", waiting=["cmpl-a-1", "cmpl-b-0"])
    assert [bench.told(name).losses for name in ("cmpl-a-0", "cmpl-a-1", "cmpl-b-0")] == [(1,), (1,), ()]


@pytest.mark.parametrize("num_cleared", range(MAX_CLEARED + 1))
def test_who_was_cleared_often_enough_runs_alone_to_its_end(num_cleared: int) -> None:
    bench = Crashing()
    suspect = msgspec.structs.replace(request("a"), num_crashes=2)
    bench.submit(suspect, num_cleared=num_cleared)
    bench.generate("a", 5 * PROBATION_OUTPUTS)
    assert bench.told("a").is_alone == (num_cleared == MAX_CLEARED)
    bench.submit(request("b"))
    assert (bench.given == ["a"]) == (num_cleared == MAX_CLEARED)
    bench.lose_target("a")
    assert bench.codes("a")[-1] == (FAILED_REPEATEDLY if num_cleared == MAX_CLEARED else None)


def test_a_suspect_that_turns_out_to_be_none_is_let_go() -> None:
    """Where it waited, and while it ran alone."""
    for has_begun in (False, True):
        bench = Crashing()
        bench.has_work = not has_begun
        suspect = msgspec.structs.replace(request("a"), num_crashes=2)
        bench.submit(suspect)
        bench.submit(request("b"))
        assert bench.given == (["a"] if has_begun else [])
        bench.submit(msgspec.structs.replace(suspect, num_crashes=1))
        if not has_begun:
            bench.has_work = False
            bench.desk.serve(bench)
        assert sorted(bench.given) == ["a", "b"]
        assert not bench.told("a").is_alone
        bench.lose_target("a", "b")
        assert bench.codes("a") == []


def test_who_is_refused_is_told_for_how_long_that_holds() -> None:
    bench = Crashing()
    bench.is_full = True
    bench.submit(request("a"))
    (refusal,) = (one for one in bench.sent if isinstance(one, Refused))
    assert (refusal.kind, refusal.retry_after_s, refusal.holds_s) == ("capacity", 1.0, 0.02)


def test_a_newer_attempt_that_has_run_alone_is_not_replayed_as_well() -> None:
    bench = Crashing()
    bench.submit(request("a"), request("b"))
    bench.is_full = True
    bench.lose_target("a", "b")
    bench.is_full = False
    newer = msgspec.structs.replace(request("a"), epoch=Epoch(1), num_crashes=2)
    bench.submit(newer)
    assert bench.given == ["a"]
    for index in range(PROBATION_OUTPUTS):
        bench.desk.deliver([msgspec.structs.replace(output("a", first_index=index), epoch=Epoch(1))])
    bench.desk.serve(bench)
    assert bench.given == ["a", "b"]


def test_an_attempt_is_ended_whose_successor_has_to_wait() -> None:
    """It would run on for nobody, and its successor would wait for its end."""
    bench = Crashing()
    bench.submit(request("a"), request("b"))
    bench.has_work = True
    newer = msgspec.structs.replace(request("a"), epoch=Epoch(1), num_crashes=2)
    bench.submit(newer)
    assert bench.aborted == [("a", 0)]
    assert bench.given == ["a", "b"], "the next is to run alone"


def held_up(state: str) -> Crashing:
    """Return a desk with room for three streams that has two, and gives its engine nothing more for now."""
    bench = Crashing(most_without_target=3)
    bench.submit(request("old"))
    if state == "a suspect waits for others to end":
        bench.has_work = True
        bench.submit(msgspec.structs.replace(request("suspect"), num_crashes=2))
    elif state == "a suspect runs":
        bench.submit(msgspec.structs.replace(request("suspect"), num_crashes=2))
    else:
        bench.submit(request("other"))
        bench.is_full = True
        bench.lose_target("old", "other")
    bench.given.clear()
    return bench


@pytest.mark.parametrize(
    "state", ["a suspect waits for others to end", "a suspect runs", "replays meet a full engine"]
)
def test_what_waits_at_a_desk_that_is_held_up_has_a_bound(state: str) -> None:
    bench = held_up(state)
    bench.submit(*(request(f"new{number}") for number in range(10)))
    assert bench.refused == [f"new{number}" for number in range(1, 10)]
    assert bench.desk.num_refused_held_up == 9
    assert bench.desk.num_refused == 0
    begun = msgspec.structs.replace(request("begun"), delivered_token_ids=(1,))
    bench.submit(begun)
    promised = msgspec.structs.replace(request("promised"), was_admitted=True)
    bench.submit(promised)
    assert not {"begun", "promised"} & set(bench.refused)
    assert bench.given == []


def test_elsewhere_it_is_the_engine_that_refuses() -> None:
    bench = Crashing(most_without_target=3)
    bench.submit(*(request(f"new{number}") for number in range(10)))
    assert bench.refused == []


def test_what_waits_for_a_round_that_does_not_end_has_a_bound() -> None:
    """A rank hangs: the engine is given nothing, and says to nobody that there are too many."""
    bench = Crashing(most_without_target=3)
    bench.submit(request("first"))
    bench.clock.advance(3.0)
    for number in range(10):
        bench.desk.hear(Envelope(sender=INGRESS, message=SubmitRequest(request(f"new{number}"))))
    assert bench.refused == [f"new{number}" for number in range(3, 10)]
    promised = msgspec.structs.replace(request("promised"), was_admitted=True)
    bench.submit(promised)
    assert "promised" not in bench.refused
    bench.submit(request("later"))
    assert bench.refused == [f"new{number}" for number in range(3, 10)], "it is given what waits again"


def test_a_client_that_comes_back_to_what_has_failed_is_told_so() -> None:
    bench = Crashing()
    suspect = msgspec.structs.replace(request("cmpl-ab-0"), num_crashes=2, resumption=RESUMPTION)
    bench.submit(suspect)
    bench.lose_target("cmpl-ab-0")
    assert bench.codes("cmpl-ab-0") == [FAILED_REPEATEDLY]
    again = msgspec.structs.replace(
        suspect, request_id=RequestId("cmpl-ab-1~12ab"), num_crashes=0, delivered_token_ids=(5,)
    )
    bench.submit(again)
    assert bench.codes("cmpl-ab-1~12ab") == [FAILED_REPEATEDLY]
    assert bench.given == []
    stranger = msgspec.structs.replace(
        again, request_id=RequestId("x"), resumption=msgspec.structs.replace(RESUMPTION, proof=b"other")
    )
    bench.submit(stranger)
    assert bench.given == ["x"]
    bench.clock.advance(61.0)
    bench.submit(again)
    assert bench.given == ["x", "cmpl-ab-1~12ab"], "nobody can come back so late"


def test_desks_hear_from_doors_what_has_failed_elsewhere() -> None:
    bench = Crashing()
    bench.desk.hear(Envelope(sender=INGRESS, message=Hello(0, (RESUMPTION,))))
    for proof in (b"mine", b"other"):
        bench.desk.hear(Envelope(sender=INGRESS, message=Recall(1, ("cmpl-ab-1",), proof)))
    assert [one.has_failed for one in bench.sent if isinstance(one, Recalled)] == [True, False]


def test_a_status_says_nothing_of_a_target_that_is_gone() -> None:
    bench = Crashing()
    bench.desk.status = TargetGroupStatus(num_running=3, kv_cache_usage=0.25, utilization=0.75)

    def told() -> tuple[float, float]:
        bench.desk.hear(Envelope(sender=INGRESS, message=StatusQuery(1)))
        reply = bench.sent[-1]
        assert isinstance(reply, StatusReply)
        assert reply.status is not None
        return reply.status.kv_cache_usage, reply.status.utilization

    assert told() == (0.25, 0.75)
    bench.desk.set_target(None)
    assert told() == (0.0, 0.0)


def test_a_desk_that_stood_still_blames_no_door_for_that() -> None:
    """What they have said meanwhile is taken in after the first look."""
    clock, lease_s = ManualClock(), 6.0
    desk = RequestDesk(lambda peer_id, message: None, clock, lease_s=lease_s)
    doors = [PeerId("first"), PeerId("second")]

    def ping(door: PeerId) -> None:
        desk.hear(Envelope(sender=door, message=Ping(1)))

    for door in doors:
        request = Request(
            request_id=RequestId(f"of-{door}"), prompt_token_ids=(1,), params=SamplingParams(), seed=1
        )
        desk.hear(Envelope(sender=door, message=SubmitRequest(request)))
    desk.tick()
    for standstill_s in (0.7 * lease_s, 10 * lease_s):
        clock.advance(standstill_s)
        ping(doors[0])
        desk.tick()
        assert desk.num_streams == 2
        ping(doors[1])
    for _ in range(13):
        clock.advance(0.5)
        ping(doors[0])
        desk.tick()
    assert desk.num_streams == 1, "who says nothing while it could be heard is gone"
