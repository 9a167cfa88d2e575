"""The codec: every message survives, nothing else gets through."""

from __future__ import annotations

import contextlib
import typing

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from specdec.core.description import TargetDescription
from specdec.core.distributions import TokenDistribution
from specdec.core.errors import ProtocolError
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput, RequestStats, TokenLogprobs
from specdec.core.plan import AdmittedSequence, TargetResult, TargetStep, TargetWork, WorkResult
from specdec.core.request import Request, Resumption
from specdec.core.sampling_params import SamplingParams
from specdec.transport import messages as m
from specdec.transport.status import ChoiceStatus, DraftLinkStatus, TargetGroupStatus

ID = RequestId("cmpl-1-0")
BIG = (1 << 64) - 1
PARAMS = SamplingParams(
    temperature=0.7,
    top_k=4,
    repetition_penalty=1.2,
    logit_bias=((5, -1.5),),
    bad_words=((1, 2), (3,)),
    allowed_token_ids=(1, 5),
    stop=("\n\n",),
    stop_token_ids=(7,),
    seed=3,
)
OUTPUT = RequestOutput(
    request_id=ID,
    epoch=Epoch(2),
    first_index=3,
    token_ids=(5, 6),
    text="\u00e9x",
    logprobs=(TokenLogprobs(5, -0.5, ((5, -0.5), (9, -2.0))), TokenLogprobs(6, -0.25, ())),
    finish_reason="stop",
    stop_reason="\n\n",
    stats=RequestStats(arrival_s=1.5),
)
EXAMPLES: list[m.Message] = [
    m.Hello(7, (Resumption(name="cmpl-1-0", proof=b"mine", window_s=60.0),)),
    m.Welcome(
        7,
        TargetDescription(
            model_id="demo",
            revision="r",
            dtype="float32",
            vocab_size=11,
            max_model_len=64,
            eos_token_ids=(2,),
            num_blocks=8,
            block_size=16,
            device="cpu of some kind, 2 threads",
        ),
    ),
    m.Fenced(1, 2),
    m.Fatal("out of memory"),
    m.StepPart(1, 2, 0, 3, b"\x00\xff"),
    m.RunStep(
        1,
        2,
        TargetStep(
            3,
            (TargetWork(ID, (1, 2), 5, 2, 0, (3, 4), (-1, 0)),),
            (AdmittedSequence(ID, BIG, PARAMS, 2, (3, 4, 5)),),
            (ID,),
        ),
    ),
    m.StepDone(
        1,
        2,
        TargetResult(
            3, (WorkResult((4, 5)), WorkResult((), None, "non-finite logits", "non_finite_logits")), 0.1, 0.2
        ),
    ),
    m.ProposeRequest(4, (m.ProposeEntry(ID, 1, 9, BIG, 4, 0, (1, 2), m.DraftOpening(PARAMS, BIG, 2)),)),
    m.ProposeReply(4, (m.ProposeAnswer(ID, 1, 9, BIG, (3, 4), "target"),), 0.25),
    m.ProposeRequest(5, (m.ProposeEntry(ID, 1, 9, BIG, 4, 9, (), None, (3, 4), (1, 0, 3)),)),
    m.ProposeReply(
        5,
        (
            m.ProposeAnswer(
                *(ID, 1, 9, BIG, (), "draft"),
                branches=(
                    m.DraftBranch(12, BIG, (3, 4)),
                    m.DraftBranch(10, 0, (5,), (TokenDistribution(bytes(8), bytes(8)),)),
                ),
            ),
        ),
    ),
    m.Release(((ID, 3),)),
    m.SubmitRequest(Request(request_id=ID, prompt_token_ids=(1, 2, 3), params=PARAMS, seed=BIG), 1),
    m.Admitted(ID, Epoch(1), False, True, (1, 3), 2),
    m.Refused(ID, Epoch(1), "capacity", "full", None, 2.5),
    m.OutputFrame((OUTPUT,)),
    m.Abort(ID, Epoch(1)),
    m.Ping(1),
    m.Pong(1, ((ID, Epoch(1)),), 2, 3, True, False, True, 1088),
    m.MetricsQuery(1),
    m.StatusQuery(1),
    m.Recall(3, ("cmpl-1-0", "cmpl-1-1"), b"\x00\xffproof"),
    m.Recalled(3, (("cmpl-1-0", (5, 6)), ("cmpl-1-0", ())), True),
    m.StatusReply(1, None),
    m.StatusReply(
        2,
        TargetGroupStatus(
            id="coordinator-1",
            num_running=3,
            choice=ChoiceStatus(
                mode="draft_ahead",
                is_speculating=True,
                reason="gain",
                explanation="it gains",
                mean_num_draft_tokens=2.5,
                num_requests_by_k={2: 1, 3: 1},
                expected_tokens_per_s=90.0,
                expected_tokens_per_s_by_mode={"plain": 50.0, "draft_ahead": 90.0},
                expected_draft_s=0.01,
                expected_verify_s=0.02,
                expected_round_s=0.02,
                expected_acceptance=(0.8, 0.7),
                pool_worth=1.8,
            ),
            draft_workers=(DraftLinkStatus(worker="draft-1", num_requests=3, is_waited_for=True),),
        ),
    ),
    m.MetricsReply(1, {"x": 1.5}),
    m.DoorReport(
        {'http_requests_total{status="200"}': 3.0}, {"http_requests_in_progress": 1.0}, {"rounds": 2.0}
    ),
    m.DoorTotals({"rounds": 12.0}, {"coordinators": 2.0}),
    m.LaneOffer("drafthouse-0", bytes(32)),
    m.LaneMoved("drafthouse-0"),
    m.SendHidden(
        incarnation=3,
        coordinator="coordinator-1",
        receiver="draft-1-tensors",
        endpoint="tcp://10.0.0.3:41123",
        public_key="ab" * 32,
        wishes=(m.HiddenWish(RequestId("r1"), 2, 40, 1234567, 17),),
    ),
    m.HiddenStates("coordinator-1", (3, 17, 30), (m.HiddenRun(RequestId("r1"), 2, 40, 1234567, 17, 22),)),
]


def test_every_message_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(typing.get_args(m.Message))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_round_trip(message: m.Message) -> None:
    assert m.decode(m.encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_what_channels_say_to_each_other_is_known_by_its_frame(message: m.Message) -> None:
    assert m.is_of_channels(m.encode(message)) == isinstance(message, m.LaneOffer | m.LaneMoved)


@pytest.mark.parametrize("frame", [b"", b"DH", m.encode(m.Ping(1))[:4], b"x" * 9])
def test_what_is_no_frame_is_not_of_channels(frame: bytes) -> None:
    assert not m.is_of_channels(frame)


def test_another_version_is_told_apart_from_rubbish() -> None:
    frame = bytearray(m.encode(m.Ping(1)))
    frame[2] += 1
    with pytest.raises(m.WrongVersion, match="expected 1"):
        m.decode(bytes(frame))
    with pytest.raises(ProtocolError, match="not a Drafthouse frame"):
        m.decode(b"GET / HTTP/1.1\r\n\r\n")


def test_fields_added_by_a_newer_peer_are_ignored() -> None:
    frame = m.encode(m.Ping(1))
    tag_and_fields = msgspec.msgpack.decode(frame[3:])
    assert m.decode(frame[:3] + msgspec.msgpack.encode([*tag_and_fields, "new"])) == m.Ping(1)


ENTRY = [ID, 1, 9, 7, 4, 0, [1, 2], None]
ANSWER = [ID, 1, 9, 7, [3], None, None, False, None]


def frame_of(tag: int, *fields: object) -> bytes:
    return m.encode(m.Ping(1))[:3] + msgspec.msgpack.encode([tag, *fields])


def test_peers_that_know_nothing_of_looking_ahead_are_understood() -> None:
    request = m.decode(frame_of(20, 4, [ENTRY]))
    assert request == m.ProposeRequest(4, (m.ProposeEntry(ID, 1, 9, 7, 4, 0, (1, 2)),))
    assert request.entries[0].fan_out is None
    assert m.decode(frame_of(21, 4, [ANSWER])) == m.ProposeReply(4, (m.ProposeAnswer(ID, 1, 9, 7, (3,)),))


def test_peers_that_know_nothing_of_crashes_are_understood() -> None:
    assert m.decode(frame_of(31, ID, 1)) == m.Admitted(ID, Epoch(1), has_begun=True, is_alone=None)
    assert m.decode(frame_of(1, 7)) == m.Hello(7, ())
    assert m.decode(frame_of(41, 1, [])) == m.Pong(1, (), max_streams=0)
    assert m.decode(frame_of(47, 3, [])) == m.Recalled(3, (), has_failed=False)


@pytest.mark.parametrize(
    "frame",
    [
        frame_of(20, 4, [[*ENTRY, 3]]),
        frame_of(20, 4, [[*ENTRY, ["a"], [1, 1]]]),
        frame_of(20, 4, [[*ENTRY, [3], 2]]),
        frame_of(20, 4, [[*ENTRY, [3], [1, 0.5]]]),
        frame_of(20, 4, [[*ENTRY, [3], [1, None]]]),
        frame_of(21, 4, [[*ANSWER, 1]]),
        frame_of(21, 4, [[*ANSWER, [[10, 5]]]]),
        frame_of(21, 4, [[*ANSWER, [[10, 5, ["a"]]]]]),
        frame_of(21, 4, [[*ANSWER, [[10, 5, [1], [[[1], ["x"]]]]]]]),
    ],
    ids=[
        *("pending is no list", "pending of no numbers", "fan-out is no list", "half a guess", "no number"),
        *("branches are no list", "a branch without tokens", "tokens of no numbers", "q of no numbers"),
    ],
)
def test_malformed_ahead_fields_are_protocol_errors(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        m.decode(frame)


@hypothesis.given(st.binary(max_size=200))
def test_no_bytes_do_more_than_raise_a_protocol_error(body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        m.decode(m.encode(m.Ping(1))[:3] + body)


@hypothesis.given(st.integers(0, len(EXAMPLES) - 1), st.data())
def test_a_damaged_frame_does_no_more_than_raise_a_protocol_error(index: int, data: st.DataObject) -> None:
    frame = bytearray(m.encode(EXAMPLES[index]))
    position = data.draw(st.integers(0, len(frame) - 1))
    frame[position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        m.decode(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
