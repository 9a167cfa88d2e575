"""The codec: every message survives, nothing else gets through."""

from __future__ import annotations

import contextlib
import typing

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from specdec.core.errors import ProtocolError
from specdec.core.ids import Epoch
from specdec.core.plan import TargetResult
from specdec.transport import messages as m
from tests.specdec.transport.message_examples import EXAMPLES, ID


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


def test_target_workers_that_tell_of_no_counts_are_understood() -> None:
    assert m.decode(frame_of(11, 1, 2, [3, []])) == m.StepDone(1, 2, TargetResult(3, ()), None)


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
