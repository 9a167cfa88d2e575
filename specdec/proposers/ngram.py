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

_MOST_READ = 4096
"""Tokens of long new texts that are indexed in one call: the round waits for it, a few milliseconds."""
_ALWAYS_READ = 128
"""Tokens of one sequence that are indexed in any case."""
_MOST_INDEXED = 1 << 17
"""Last tokens of a text that are looked at: all of them in shorter texts, at least half as many in longer
ones. About 500 bytes of memory for each."""

_Followers = dict[tuple[int, ...], int]


class _NgramIndex:
    """Where each n-gram of one sequence was last followed by something.

    It grows with the sequence: a token costs one entry per n-gram length, whatever the length of the text.
    When as many are indexed as there may be, the older half gives way.
    """

    __slots__ = ("_num_indexed", "_num_young", "_old", "_sizes", "_young", "seen")

    def __init__(self, sizes: range) -> None:
        self.seen = SeenPrefix()
        self._sizes = sizes
        self._young: _Followers = {}
        self._old: _Followers = {}
        self._num_young = self._num_indexed = 0

    def read(self, token_ids: Sequence[int], most: int) -> int:
        """Index n-grams that are followed by a token, from where it was left off; return of how many tokens,
        at most so many.
        """
        length = len(token_ids)
        start = first = max(self._num_indexed, 1, length - _MOST_INDEXED)
        end = min(length, first + most)
        while start < end:
            stop = min(end, start + _MOST_INDEXED // 2 - self._num_young)
            followers = self._young
            for follower in range(start, stop):
                for size in self._sizes:
                    if size <= follower:
                        followers[tuple(token_ids[follower - size : follower])] = follower
            self._num_young += stop - start
            if self._num_young >= _MOST_INDEXED // 2:
                self._young, self._old, self._num_young = {}, followers, 0
            start = stop
        self._num_indexed = max(self._num_indexed, end)
        return max(0, end - first)

    def look_up(self, token_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Return at most `num_tokens` tokens that may follow; nothing when no n-gram occurred before."""
        length = len(token_ids)
        for size in reversed(self._sizes):
            if size >= length:
                continue
            last = tuple(token_ids[length - size :])
            follower = self._young.get(last, self._old.get(last))
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
        """Look every sequence up; see the contract. Long texts are indexed over several calls."""
        proposals: dict[RequestId, Proposal] = {}
        left = _MOST_READ
        for sequence in sequences:
            index = self._index_of(sequence)
            left -= index.read(sequence.token_ids, max(left, _ALWAYS_READ))
            index.seen.update(sequence)
            budget = num_draft_tokens.get(sequence.request_id, 0)
            if budget > 0 and (token_ids := index.look_up(sequence.token_ids, budget)):
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

    def _index_of(self, sequence: SequenceView) -> _NgramIndex:
        index = self._indices.get(sequence.request_id)
        if index is None or not index.seen.continues_in(sequence):
            index = self._indices[sequence.request_id] = _NgramIndex(self._sizes)
        return index
