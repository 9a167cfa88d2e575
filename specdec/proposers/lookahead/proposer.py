"""Lookahead decoding (Fu et al., 2024): the target makes n-grams up itself, and verifies those that fit.

In each round the target runs, beside what verifies a draft, the rows of a window of guesses (`window`). Its
n-grams go into a pool (`pool`); those that begin with the last committed token are proposed, as a tree.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.rows_beside import RowsBeside
from specdec.core.sequence import SequenceView
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.lookahead.config import LookaheadConfig
from specdec.proposers.lookahead.pool import NgramPool, tree_of
from specdec.proposers.lookahead.window import Levels, advanced, begin, ngrams_of, rows_of
from specdec.proposers.prefix import SeenPrefix


class _Stream:
    """What is known of one sequence."""

    __slots__ = ("last_token", "levels", "num_answered", "num_read", "pool", "seen")

    def __init__(self, sequence: SequenceView, config: LookaheadConfig) -> None:
        self.seen = SeenPrefix()
        self.pool = NgramPool(config.verification_set_size, config.max_pool_ngrams)
        self.num_read = 0
        """Tokens of the text whose n-grams have been looked at."""
        guesses = random.Random(sequence.seed).choices(sequence.token_ids, k=config.num_rows_beside)
        self.levels: Levels = begin(config.window_size, config.ngram_size, guesses)
        self.last_token = sequence.token_ids[-1]
        self.num_answered = 0
        """Rounds of the window."""

    @property
    def rows(self) -> RowsBeside:
        """The window."""
        return rows_of(self.levels)

    def read(self, token_ids: Sequence[int], config: LookaheadConfig) -> None:
        """Add the n-grams of the text that have not been looked at."""
        size = config.ngram_size
        first = max(0, self.num_read - size + 1, len(token_ids) - size + 1 - config.max_pool_ngrams)
        for start in range(first, len(token_ids) - size + 1):
            self.pool.add(token_ids[start : start + size])
        self.num_read = len(token_ids)

    def go_on(self, sequence: SequenceView) -> None:
        """Take the sequence as it is now."""
        self.seen.update(sequence)
        self.last_token = sequence.token_ids[-1]

    def hear(self, answers: Sequence[int]) -> None:
        """Take what the target says to the window: it moves."""
        # The first guesses come from nowhere: n-grams that have them in their rest are of no use.
        if self.num_answered >= len(self.levels) - 1:
            for ngram in ngrams_of(self.levels, self.last_token, answers):
                self.pool.add(ngram)
        self.levels = advanced(self.levels, answers)
        self.num_answered += 1


class LookaheadProposer:
    """Implements `Proposer` and `HearsBeside`."""

    def __init__(self, config: LookaheadConfig) -> None:
        """Look ahead as the configuration says."""
        self.capabilities = ProposerCapabilities(
            name="lookahead", shape="tree", num_rows_beside=config.num_rows_beside
        )
        self._config = config
        self._streams: dict[RequestId, _Stream] = {}

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """See `Proposer.propose`. Every sequence with a budget has a window, if not a draft."""
        return {
            sequence.request_id: self._proposal(sequence, budget)
            for sequence in sequences
            if (budget := num_draft_tokens.get(sequence.request_id, 0)) > 0
        }

    def hear_beside(self, proposal: Proposal, token_ids: Sequence[int]) -> None:
        """See `HearsBeside.hear_beside`."""
        stream = self._streams.get(proposal.request_id)
        if stream is None or len(token_ids) != self._config.window_size:
            return
        prefix = (stream.seen.length, stream.seen.prefix_hash)
        if prefix == (proposal.committed_len, proposal.prefix_hash) and proposal.beside == stream.rows:
            stream.hear(token_ids)

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """See `Proposer.release`."""
        for request_id in request_ids:
            self._streams.pop(request_id, None)

    def close(self) -> None:
        """See `Proposer.close`."""
        self._streams.clear()

    def _proposal(self, sequence: SequenceView, budget: int) -> Proposal:
        stream = self._streams.get(sequence.request_id)
        if stream is None or not stream.seen.continues_in(sequence):
            stream = self._streams[sequence.request_id] = _Stream(sequence, self._config)
        stream.go_on(sequence)
        if self._config.reads_text:
            stream.read(sequence.token_ids, self._config)
        token_ids, parents = tree_of(stream.pool.behind(stream.last_token), budget)
        return Proposal(
            request_id=sequence.request_id,
            committed_len=sequence.committed_len,
            prefix_hash=sequence.prefix_hash,
            token_ids=token_ids,
            parents=parents or None,
            beside=stream.rows,
            method=self.capabilities.name,
        )
