from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from cluster.output_frames import OutputFrames, too_large
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput, TokenLogprobs
from specdec.core.sampling_params import MAX_LOGPROBS
from specdec.transport.messages import OutputFrame, encode

MAX_BYTES = 1 << 16
SCORES = TokenLogprobs(5, -0.5, tuple((token_id, -0.5 - token_id) for token_id in range(MAX_LOGPROBS)))


def output(num_scored: int, name: str = "a") -> RequestOutput:
    return RequestOutput(
        request_id=RequestId(name),
        epoch=Epoch(0),
        first_index=0,
        token_ids=(5,),
        text="a",
        prompt_logprobs=(SCORES,) * num_scored or None,
    )


def lengths(frames: Sequence[Sequence[RequestOutput]]) -> list[int]:
    return [len(frame) for frame in frames]


def test_what_is_short_goes_together() -> None:
    outputs = [output(10, name) for name in "abc"]
    assert list(OutputFrames(MAX_BYTES).divided(outputs)) == [tuple(outputs)]


@pytest.mark.parametrize("num_scored", range(0, 260, 20))
def test_every_frame_can_be_sent_and_nothing_is_left_out(num_scored: int) -> None:
    frames = OutputFrames(MAX_BYTES)
    outputs = [output(number, f"{number}") for number in (0, num_scored, 120, 3, num_scored)]
    assert all(map(frames.holds, outputs))
    divided = list(frames.divided(outputs))
    assert [one for frame in divided for one in frame] == outputs
    assert all(len(encode(OutputFrame(frame))) <= MAX_BYTES for frame in divided)


def test_what_no_frame_holds_is_told_by_its_length() -> None:
    """Not by the bound of it, which is above."""
    frames = OutputFrames(MAX_BYTES)
    longest = next(number for number in range(200, 400) if not frames.holds(output(number))) - 1
    assert len(msgspec.msgpack.encode(output(longest))) <= MAX_BYTES
    assert len(encode(OutputFrame((output(longest),)))) <= MAX_BYTES
    assert len(encode(OutputFrame((output(longest + 2),)))) > MAX_BYTES


def test_a_client_is_told_what_to_ask_for_less_of() -> None:
    assert "log-probabilities of 7 prompt tokens" in too_large(output(7))
