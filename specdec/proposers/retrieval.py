"""Retrieval: what followed the end of the text in a corpus that the user gave.

After He et al., "REST: Retrieval-Based Speculative Decoding" (2023).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.continuations import Continuation, likely_chain, likely_tree
from specdec.proposers.corpus import Corpus
from specdec.proposers.lookup_config import RetrievalConfig
from specdec.proposers.suffix_array import occurrences, occurs
from specdec.proposers.suffix_automaton import NO_TOKEN

_METHOD = "retrieval"
_MOST_SAMPLES = 64
"""Occurrences that are looked at, spread over all of them."""


class RetrievalProposer:
    """Implements `Proposer`. Nothing is kept of sequences, and nothing is learnt from them."""

    def __init__(self, config: RetrievalConfig, corpus: Corpus) -> None:
        """Look up in `corpus`."""
        self.capabilities = ProposerCapabilities(name=_METHOD, shape=config.shape)
        self._config = config
        self._corpus = corpus

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Look every sequence up; see the contract."""
        proposals: dict[RequestId, Proposal] = {}
        for sequence in sequences:
            budget = num_draft_tokens.get(sequence.request_id, 0)
            if budget == 0:
                continue
            found = self._continue(sequence.token_ids[-self._config.max_match_tokens :], budget)
            if found is not None and found.token_ids:
                proposals[sequence.request_id] = Proposal(
                    request_id=sequence.request_id,
                    committed_len=sequence.committed_len,
                    prefix_hash=sequence.prefix_hash,
                    token_ids=found.token_ids,
                    parents=found.parents,
                    method=_METHOD,
                )
        return proposals

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """The corpus is only mapped."""

    def _continue(self, end: Sequence[int], num_tokens: int) -> Continuation | None:
        length, found = self._longest_match(end)
        if length < self._config.min_match_tokens:
            return None
        picked = np.linspace(found.start, found.stop - 1, min(len(found), _MOST_SAMPLES)).astype(np.int64)
        behind = self._corpus.suffixes[picked][:, None] + np.arange(length, length + num_tokens)
        followed = _Followed(self._corpus.token_ids[behind].tolist())
        continued = likely_tree if self._config.shape == "tree" else likely_chain
        return continued(followed, 0, num_tokens, self._config.min_token_probability)

    def _longest_match(self, end: Sequence[int]) -> tuple[int, range]:
        """Return how many of the last tokens occur in the corpus, and where: found by bisection."""
        corpus = self._corpus
        length, too_long = 0, len(end) + 1
        while too_long - length > 1:
            tried = (length + too_long) // 2
            if occurs(corpus.token_ids, corpus.suffixes, end[-tried:]):
                length = tried
            else:
                too_long = tried
        string = end[len(end) - length :]
        return length, occurrences(corpus.token_ids, corpus.suffixes, string) if length else range(0)


class _Followed:
    """What came behind some occurrences, as `Followers`; a place stands for those that agree so far."""

    def __init__(self, rows: list[list[int]]) -> None:
        self._places = [(0, rows)]

    def __call__(self, place: int, /) -> list[tuple[float, int, int]]:
        depth, rows = self._places[place]
        if depth == len(rows[0]):
            return []
        counts = Counter(row[depth] for row in rows)
        found = []
        for token_id, count in counts.most_common():
            if token_id != NO_TOKEN:
                found.append((count / len(rows), token_id, len(self._places)))
                self._places.append((depth + 1, [row for row in rows if row[depth] == token_id]))
        return found
