"""What ends a stream, where its text comes in pieces of characters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.text_stream import StreamLimits, TextStream

PIECES = (b"a", b"bc\xe6", b"\xbc\xa2")
"""The second ends in the first byte of the character that the third completes."""


class Bytes:
    """A tokenizer whose tokens are bytes."""

    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join(PIECES[index] for index in token_ids).decode("utf-8", errors="replace")


def read(token_ids: Sequence[int], params: SamplingParams) -> tuple[list[str], TextStream]:
    """Text released by each token."""
    request = Request(request_id=RequestId("r"), prompt_token_ids=(0,), params=params, seed=0)
    stream = TextStream(request, Bytes(), StreamLimits(max_sequence_len=100, eos_token_ids=()))
    return [stream.read(token_id, index + 1) for index, token_id in enumerate(token_ids)], stream


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
