"""What ends a stream, where its text comes in pieces of characters."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.text.text_stream import StreamLimits, TextStream

PIECES = (b"a", b"bc\xe6", b"\xbc\xa2")
"""The second ends in the first byte of the character that the third completes."""


class Bytes:
    """A tokenizer whose tokens are bytes."""

    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(PIECES[index] for index in token_ids).decode("utf-8", errors="replace")


def new_stream(params: SamplingParams) -> TextStream:
    request = Request(request_id=RequestId("r"), prompt_token_ids=(0,), params=params, seed=0)
    return TextStream(request, Bytes(), StreamLimits(max_sequence_len=100, eos_token_ids=()))


def read(token_ids: Sequence[int], params: SamplingParams) -> tuple[list[str], TextStream]:
    """Text released by each token."""
    stream = new_stream(params)
    texts = []
    for index, token_id in enumerate(token_ids):
        stream.advance(token_id, index + 1)
        texts.append(stream.take())
    return texts, stream


def test_characters_are_never_split() -> None:
    texts, _ = read([0, 1, 2, 0], SamplingParams(max_tokens=4))
    assert texts == ["a", "", "bc\u6f22", "a"]


@pytest.mark.parametrize("included", [False, True])
def test_stop_string_in_what_waits_for_a_character_is_found_at_the_end(included: bool) -> None:
    params = SamplingParams(max_tokens=2, stop=("c",), include_stop_str_in_output=included)
    texts, stream = read([0, 1], params)
    assert "".join(texts) == ("abc" if included else "ab")
    assert stream.finish is not None
    assert (stream.finish.reason, stream.finish.stop_reason) == ("stop", "c")


def test_part_of_a_character_at_the_end_is_replaced() -> None:
    texts, stream = read([0, 1], SamplingParams(max_tokens=2, stop=("x", "c\ufffdy")))
    assert "".join(texts) == "abc\ufffd"
    assert stream.finish is not None
    assert stream.finish.reason == "length"


@pytest.mark.parametrize("stop", [(), ("cab",), ("\u6f22",)], ids=["no stop", "stop", "stop across tokens"])
@pytest.mark.parametrize("included", [False, True])
def test_text_does_not_depend_on_when_it_is_taken(stop: tuple[str, ...], included: bool) -> None:
    generator = random.Random(7)
    for case in range(200):
        params = SamplingParams(
            max_tokens=generator.randrange(1, 12),
            min_tokens=generator.randrange(3) if case % 2 else 0,
            stop=stop,
            stop_token_ids=(2,) if case % 3 == 0 else (),
            include_stop_str_in_output=included,
        )
        stream, other = new_stream(params), new_stream(params)
        taken, other_taken = "", ""
        for index in range(12):
            token_id = generator.randrange(len(PIECES))
            stream.advance(token_id, index + 1)
            other.advance(token_id, index + 1)
            assert stream.finish == other.finish
            taken += stream.take()
            if generator.random() < 0.3:
                other_taken += other.take()
                assert other_taken == taken
            if stream.finish is not None:
                break
            if generator.random() < 0.05:
                stream.drain()
                other.drain()
                taken += stream.take()
                break
        assert other_taken + other.take() == taken
        assert stream.take() == other.take() == ""
