"""How long messages to draft workers, and their answers, are.

The bound of the former is what the longest of one sequence needs. One message could tell all sequences of a
coordinator at once, from their first token on. A draft worker has to understand it in one piece, however many
others wait; so what is told is divided. Answers are divided where they do not fit into one message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

import msgspec

from specdec.core.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS
from specdec.engine.draft_pool.entries import MAX_PENDING
from specdec.transport.inbox import TURN_BYTES
from specdec.transport.messages import DraftBranch, ProposeAnswer, ProposeEntry
from specdec.transport.parts import in_parts

_TOKEN_BYTES = 5
"""A token id in msgpack, at most."""
_BIAS_BYTES = 1 + _TOKEN_BYTES + 9
_ENTRY_BYTES = 128
"""All of an entry but its tokens, its opening and its name: some numbers, at most."""
_HEAD_BYTES = 64
"""Of a message, before its entries."""
_ANSWER_BYTES = 96
"""All of an answer, or of a branch, but its tokens, their rows and its name, at most."""
_ROW_BYTES = 11
"""Of a row, beside what it holds."""
_REST_BYTES = 4096
"""Of an opening: numbers, names and salts."""


def longest_message_bytes(*, max_model_len: int, vocab_size: int, grammar_bytes: int) -> int:
    """Return how long a message about one sequence may be, or one about several short ones.

    Args:
        max_model_len: longest sequence of the target, in tokens.
        vocab_size: the target's; a request may allow, and stop at, any of its tokens.
        grammar_bytes: longest grammar of a request.
    """
    num_listed = 2 * vocab_size + MAX_BAD_WORDS * (1 + MAX_BAD_WORD_TOKENS)
    longest = (
        _HEAD_BYTES
        + _ENTRY_BYTES
        + _TOKEN_BYTES * (max_model_len + num_listed + 2 * MAX_PENDING + 1)
        + _BIAS_BYTES * MAX_LOGIT_BIAS
        + grammar_bytes
        + _REST_BYTES
    )
    return max(TURN_BYTES, longest)


class SizedEntry(NamedTuple):
    """An entry, and how many bytes of a message it takes, or a few more."""

    entry: ProposeEntry
    num_bytes: int

    @classmethod
    def of(cls, entry: ProposeEntry) -> Self:
        """Return an entry with its size."""
        num_numbers = len(entry.token_ids) + len(entry.pending) + len(entry.fan_out or ())
        num_bytes = _ENTRY_BYTES + 4 * len(entry.request_id) + _TOKEN_BYTES * num_numbers
        if entry.opening is not None:
            num_bytes += len(msgspec.msgpack.encode(entry.opening))
        return cls(entry, num_bytes)

    def fits(self, max_message_bytes: int) -> bool:
        """Return whether a message may tell of it at all."""
        return self.num_bytes + _HEAD_BYTES <= max_message_bytes


def divided(entries: Iterable[SizedEntry], max_message_bytes: int) -> Iterator[tuple[ProposeEntry, ...]]:
    """Yield the entries of one message after the other: a turn's worth, or what is longer alone."""
    return in_parts(entries, min(TURN_BYTES, max_message_bytes) - _HEAD_BYTES)


def divided_answers(
    answers: Iterable[ProposeAnswer], max_message_bytes: int
) -> Iterator[tuple[ProposeAnswer, ...]]:
    """Yield the answers of one message after the other; what is too long for any is cut.

    Whether a sampled token stays may depend on what it was drawn from, and on the tokens before it, but not
    on itself: later rows are as wide as it makes them. So a draft keeps its first tokens, as far as they fit
    into its own share of a message.
    """
    most_bytes = max_message_bytes - _HEAD_BYTES - _REST_BYTES
    cut = (_cut(answer, most_bytes) for answer in answers)
    return in_parts(((answer, _answer_bytes(answer)) for answer in cut), most_bytes)


def _cut(answer: ProposeAnswer, most_bytes: int) -> ProposeAnswer:
    """Return an answer whose draft, and each of whose branches, takes no more than an equal share."""
    share = (most_bytes - 4 * len(answer.request_id)) // (1 + len(answer.branches))
    if _answer_bytes(answer) <= share:
        return answer
    num_kept = _num_fitting(answer, share)
    if num_kept < len(answer.token_ids):
        parents, q_rows = answer.parents, answer.q_rows
        answer = msgspec.structs.replace(
            answer,
            token_ids=answer.token_ids[:num_kept],
            parents=None if parents is None or not num_kept else parents[:num_kept],
            q_rows=None if q_rows is None or not num_kept else q_rows[:num_kept],
            noise_stream=answer.noise_stream if num_kept or answer.branches else None,
        )
    branches = [(branch, _num_fitting(branch, share)) for branch in answer.branches]
    return msgspec.structs.replace(
        answer,
        branches=tuple(
            msgspec.structs.replace(
                branch,
                token_ids=branch.token_ids[:num],
                q_rows=None if branch.q_rows is None else branch.q_rows[:num],
            )
            for branch, num in branches
            if num
        ),
    )


def _num_fitting(drafted: ProposeAnswer | DraftBranch, most_bytes: int) -> int:
    """Return how many of the first tokens fit, with what they were drawn from."""
    num_bytes = _ANSWER_BYTES
    for index in range(len(drafted.token_ids)):
        num_bytes += 2 * _TOKEN_BYTES  # with its parent
        if drafted.q_rows is not None:
            row = drafted.q_rows[index]
            num_bytes += _ROW_BYTES + len(row.token_ids) + len(row.probabilities)
        if num_bytes > most_bytes:
            return index
    return len(drafted.token_ids)


def _answer_bytes(answer: ProposeAnswer) -> int:
    """Return how long an answer is, or a little more: encoding it to find out would double what it costs."""
    num_parents = 0 if answer.parents is None else len(answer.parents)
    return (
        4 * len(answer.request_id)
        + _TOKEN_BYTES * num_parents
        + _drafted_bytes(answer)
        + sum(map(_drafted_bytes, answer.branches))
    )


def _drafted_bytes(drafted: ProposeAnswer | DraftBranch) -> int:
    rows = drafted.q_rows or ()
    return (
        _ANSWER_BYTES
        + _TOKEN_BYTES * len(drafted.token_ids)
        + sum(_ROW_BYTES + len(row.token_ids) + len(row.probabilities) for row in rows)
    )
