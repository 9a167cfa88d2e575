from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.ids import RequestId
from specdec.core.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    Grammar,
    SamplingParams,
)
from specdec.engine.draft_pool.entries import MAX_PENDING, are_token_ids, is_valid
from specdec.engine.draft_pool.message_lengths import SizedEntry, divided, longest_message_bytes
from specdec.transport.inbox import TURN_BYTES
from specdec.transport.messages import DraftOpening, ProposeEntry, ProposeRequest, encode

LARGEST = (1 << 31) - 1
NUMBER = st.integers(-(1 << 63), (1 << 64) - 1)


def an_entry(num_tokens: int, *, name: str = "chat-1", opening: DraftOpening | None = None) -> ProposeEntry:
    return ProposeEntry(
        request_id=RequestId(name),
        epoch=1_700_000_000_000_000_000,
        committed_len=num_tokens,
        prefix_hash=(1 << 64) - 1,
        num_draft_tokens=5,
        base_len=0,
        token_ids=(LARGEST,) * num_tokens,
        opening=opening,
    )


def frame_bytes(*entries: ProposeEntry) -> int:
    return len(encode(ProposeRequest((1 << 63) - 1, entries)))


def parts(entries: Sequence[ProposeEntry], most: int) -> list[tuple[ProposeEntry, ...]]:
    return list(divided(map(SizedEntry.of, entries), most))


@given(
    st.text(max_size=20),
    st.lists(NUMBER, min_size=6, max_size=6),
    st.integers(0, 70_000),
    st.integers(0, MAX_PENDING),
    st.booleans(),
)
def test_no_entry_is_longer_than_its_size(
    name: str, numbers: list[int], num_tokens: int, num_pending: int, opens: bool
) -> None:
    epoch, length, prefix_hash, num_draft_tokens, base_len, kv_budget = numbers
    entry = ProposeEntry(
        request_id=RequestId(name),
        epoch=epoch,
        committed_len=length,
        prefix_hash=prefix_hash,
        num_draft_tokens=num_draft_tokens,
        base_len=base_len,
        token_ids=(LARGEST,) * num_tokens,
        opening=DraftOpening(SamplingParams(stop=(name,)), prefix_hash, 1, name) if opens else None,
        pending=(LARGEST,) * num_pending,
        fan_out=(LARGEST,) * (num_pending + 1),
        kv_budget=kv_budget,
    )
    size = SizedEntry.of(entry)
    assert frame_bytes(entry) - frame_bytes() <= size.num_bytes
    assert size.fits(size.num_bytes + 64)
    assert frame_bytes() <= 64


def longest_entry(max_model_len: int, vocab_size: int, grammar_bytes: int) -> ProposeEntry:
    """What a request may ask for at most, each list at its longest."""
    every_token = tuple(range(LARGEST - vocab_size, LARGEST))
    params = SamplingParams(
        temperature=0.7123,
        logit_bias=tuple((LARGEST - index, 1.23456789) for index in range(MAX_LOGIT_BIAS)),
        bad_words=((LARGEST,) * MAX_BAD_WORD_TOKENS,) * MAX_BAD_WORDS,
        allowed_token_ids=every_token,
        stop_token_ids=every_token,
        min_tokens=5,
        seed=(1 << 64) - 1,
    )
    grammar = Grammar("json_schema", "x" * grammar_bytes)
    opening = DraftOpening(params, (1 << 64) - 1, max_model_len, "s" * 321, grammar, "o" * 64)
    entry = an_entry(max_model_len, name="chatcmpl-" + "0" * 50, opening=opening)
    return msgspec.structs.replace(
        entry, pending=(LARGEST,) * MAX_PENDING, fan_out=(LARGEST,) * (MAX_PENDING + 1)
    )


@pytest.mark.parametrize("max_model_len", [512, 40_000])
def test_the_longest_message_is_what_one_sequence_may_need_and_little_more(max_model_len: int) -> None:
    limits = {"max_model_len": max_model_len, "vocab_size": 5000, "grammar_bytes": 65_536}
    entry = longest_entry(**limits)
    most = longest_message_bytes(**limits)
    assert is_valid(msgspec.structs.replace(entry, fan_out=(0,) * (MAX_PENDING + 1)))
    assert SizedEntry.of(entry).fits(most)
    assert frame_bytes(entry) <= most <= frame_bytes(entry) + 20_000


def test_a_round_of_long_prompts_is_divided_and_nothing_is_lost() -> None:
    entries = [an_entry(length, name=str(length)) for length in (900, 20_000, 30_000, 5, 7, 11_000, 3)]
    found = parts(entries, 1 << 20)
    assert [entry for part in found for entry in part] == entries
    assert len(found) > 2
    for part in found:
        assert len(part) == 1 or frame_bytes(*part) <= TURN_BYTES


def test_an_ordinary_round_is_one_message() -> None:
    assert len(parts([an_entry(6, name=f"chatcmpl-{index:032}") for index in range(128)], 1 << 20)) == 1
    assert parts([], 1 << 20) == []


def test_a_smaller_bound_of_the_channel_is_kept() -> None:
    entries = [an_entry(100, name=str(index)) for index in range(50)]
    assert all(frame_bytes(*part) <= 4096 for part in parts(entries, 4096))


def test_token_ids() -> None:
    assert are_token_ids(())
    assert are_token_ids((0, LARGEST))
    assert not are_token_ids((0, LARGEST + 1))
    assert not are_token_ids((-1, 5))
