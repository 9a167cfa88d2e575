"""Prompt lookup: what followed the last few tokens when they stood in the text before.

After Saxena, "Prompt Lookup Decoding" (2023). The longest n-gram that occurred before wins, of its
occurrences the latest. Where that occurrence reaches into the end of the text itself the text repeats with
a period, and the continuation goes on repeating.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.prefix import SeenPrefix


class _NgramIndex:
    """Where each n-gram of one sequence was last followed by something.

    It grows with the sequence: a token costs one entry per n-gram length, whatever the length of the text.
    """

    __slots__ = ("_followers", "_num_indexed", "_sizes", "seen")

    def __init__(self, sizes: range) -> None:
        self.seen = SeenPrefix()
        self._sizes = sizes
        self._followers: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index every n-gram that is followed by a token, those indexed before left out."""
        followers = self._followers
        for end in range(max(self._num_indexed, 1), len(token_ids)):
            for size in self._sizes:
                if size <= end:
                    followers[tuple(token_ids[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(token_ids))

    def look_up(self, token_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Return at most `num_tokens` tokens that may follow; nothing when no n-gram occurred before."""
        length = len(token_ids)
        for size in reversed(self._sizes):
            follower = self._followers.get(tuple(token_ids[length - size :])) if size < length else None
            if follower is not None:
                period = length - follower
                return tuple([token_ids[follower + step % period] for step in range(num_tokens)])
        return ()


class NgramProposer:
    """Proposes by prompt lookup in the sequence's own tokens."""

    capabilities = ProposerCapabilities(name="ngram")

    def __init__(self, *, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        """Look up n-grams of `prompt_lookup_max` tokens, then shorter ones down to `prompt_lookup_min`."""
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ValueError(
                f"n-gram sizes must satisfy 1 <= min <= max, got {prompt_lookup_min} and {prompt_lookup_max}"
            )
        self._sizes = range(prompt_lookup_min, prompt_lookup_max + 1)
        self._indices: dict[RequestId, _NgramIndex] = {}

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Look every sequence up; see the contract."""
        proposals: dict[RequestId, Proposal] = {}
        for sequence in sequences:
            budget = num_draft_tokens.get(sequence.request_id, 0)
            if budget > 0 and (token_ids := self._continue(sequence, budget)):
                proposals[sequence.request_id] = Proposal(
                    request_id=sequence.request_id,
                    committed_len=sequence.committed_len,
                    prefix_hash=sequence.prefix_hash,
                    token_ids=token_ids,
                    method=self.capabilities.name,
                )
        return proposals

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget the indices of these sequences."""
        for request_id in request_ids:
            self._indices.pop(request_id, None)

    def close(self) -> None:
        """Forget everything."""
        self._indices.clear()

    def _continue(self, sequence: SequenceView, num_tokens: int) -> tuple[int, ...]:
        index = self._indices.get(sequence.request_id)
        if index is None or not index.seen.continues_in(sequence):
            index = self._indices[sequence.request_id] = _NgramIndex(self._sizes)
        index.extend(sequence.token_ids)
        index.seen.update(sequence)
        return index.look_up(sequence.token_ids, num_tokens)
