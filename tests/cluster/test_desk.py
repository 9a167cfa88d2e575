"""What a desk sends: everything once, in frames that fit, however long the log-probabilities are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.desk import OUTPUT_TOO_LARGE, RequestDesk
from specdec.core.clock import ManualClock
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import FinishReason, RequestOutput, TokenLogprobs
from specdec.core.request import Request
from specdec.core.sampling_params import MAX_LOGPROBS, SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.toy_target import ToyModel, ToyTarget, ToyTokenizer
from specdec.proposers.none import NoProposer
from specdec.transport.base import Envelope, PeerId
from specdec.transport.messages import Message, OutputFrame, SubmitRequest, encode

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
