"""What a draft worker makes of single entries: whether one makes sense, and how it is answered."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.errors import InputError
from specdec.core.proposal import MAX_DRAFT_TOKENS, Proposal
from specdec.sampling.noise import MASK_64
from specdec.transport.messages import DraftBranch, DraftOpening, ProposeAnswer, ProposeEntry

MAX_PENDING = 64
_MAX_BRANCHES = 64
"""Of one entry: as many as a configuration may ask for, or more. What asks for more is dropped."""
_MAX_TOKEN_ID = (1 << 31) - 1


def is_valid(entry: ProposeEntry) -> bool:
    """Return whether an entry makes sense, and what it asks for has a bounded cost.

    A budget of K/V may be any number: one beyond all texts keeps everything, as far as the pool holds it.
    Its tokens are not looked at here (`are_token_ids`): there may be more of them than anybody will read.
    """
    return (
        0 <= entry.num_draft_tokens <= MAX_DRAFT_TOKENS
        and entry.committed_len >= 1
        and len(entry.token_ids) <= entry.committed_len
        and entry.kv_budget >= 0
        and (entry.opening is None or _is_valid_opening(entry.opening))
        and (entry.fan_out is None or _is_valid_outlook(entry.pending, entry.fan_out))
    )


def are_token_ids(numbers: Sequence[int]) -> bool:
    """Return whether all numbers may be token ids."""
    return not numbers or (min(numbers) >= 0 and max(numbers) <= _MAX_TOKEN_ID)


def _is_valid_opening(opening: DraftOpening) -> bool:
    try:
        opening.params.checked().check_vocabulary(_MAX_TOKEN_ID + 1)
    except InputError:
        return False
    return 0 <= opening.num_prompt_tokens <= _MAX_TOKEN_ID and 0 <= opening.seed <= MASK_64


def _is_valid_outlook(pending: Sequence[int], fan_out: Sequence[int]) -> bool:
    return (
        len(fan_out) == len(pending) + 1 <= MAX_PENDING + 1
        and are_token_ids(pending)
        and min(fan_out) >= 0
        and sum(fan_out) <= _MAX_BRANCHES
    )


def answer_to(
    entry: ProposeEntry,
    proposals: Sequence[Proposal] = (),
    *,
    needs_start: bool = False,
    is_full: bool = False,
    lacks_memory: bool = False,
    num_unread: int = 0,
) -> ProposeAnswer:
    """Answer with what was drafted, or say why nothing was."""
    if proposals and entry.fan_out is not None:
        return _ahead_answer(entry, proposals)
    proposal = proposals[0] if proposals else None
    return ProposeAnswer(
        request_id=entry.request_id,
        epoch=entry.epoch,
        committed_len=entry.committed_len,
        prefix_hash=entry.prefix_hash,
        token_ids=proposal.token_ids if proposal is not None else (),
        noise_stream=proposal.noise_stream if proposal is not None else None,
        parents=proposal.parents if proposal is not None else None,
        needs_start=needs_start,
        q_rows=proposal.q_rows if proposal is not None else None,
        is_full=is_full,
        num_unread=num_unread,
        lacks_memory=lacks_memory,
    )


def _ahead_answer(entry: ProposeEntry, proposals: Sequence[Proposal]) -> ProposeAnswer:
    return ProposeAnswer(
        request_id=entry.request_id,
        epoch=entry.epoch,
        committed_len=entry.committed_len,
        prefix_hash=entry.prefix_hash,
        token_ids=(),
        noise_stream=proposals[0].noise_stream,
        branches=tuple(
            [DraftBranch(one.committed_len, one.prefix_hash, one.token_ids, one.q_rows) for one in proposals]
        ),
    )
