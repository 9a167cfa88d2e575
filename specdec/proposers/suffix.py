"""Suffix decoding: the most frequent continuations of the longest suffix of the text that occurred before.

After Oliaro et al., "SuffixDecoding" (2024). It is looked up in the sequence's own text and in what earlier
requests of the same cache salt generated; the longer match counts. The longer it is, the more is proposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.continuations import Continuation, likely_chain, likely_tree
from specdec.proposers.lookup_config import SuffixConfig
from specdec.proposers.prefix import SeenPrefix
from specdec.proposers.shared_texts import SharedTexts
from specdec.proposers.suffix_automaton import NO_TOKEN, ROOT, Match, SuffixAutomaton

_METHOD = "suffix"
_SHARED_METHOD = "suffix_shared"
"""Of proposals that come from other requests' text, so that metrics tell what those bring."""
_MOST_READ = 4096
"""Tokens of long new texts that are read in one call: the round waits for it."""
_ALWAYS_READ = 128
"""Tokens of one sequence that are read in any case."""
_CONTEXT = 32
"""Tokens before a response that are kept with it, so that its beginning is found too; what a match with
shared text begins with."""


class _Text:
    """What is known of one sequence."""

    __slots__ = ("automaton", "matches", "num_read", "said", "said_end", "salt", "seen", "start")

    def __init__(self, sequence: SequenceView) -> None:
        self.seen = SeenPrefix()
        self.automaton = SuffixAutomaton()
        self.start = self.num_read = 0
        """The automaton has the tokens from `start` to `num_read`."""
        self.matches: tuple[Match, ...] = ()
        self.salt = sequence.cache_salt
        self.said: list[int] = []
        self.said_end = max(0, sequence.num_prompt_tokens - _CONTEXT)

    def read(self, token_ids: Sequence[int], start: int, most: int) -> int:
        """Read at most so many of the tokens from `start`, return how many."""
        if start != self.start:
            self.automaton, self.start, self.num_read = SuffixAutomaton(), start, start
        end = min(len(token_ids), self.num_read + most)
        append = self.automaton.append
        for token_id in token_ids[self.num_read : end]:
            append(token_id)
        num_read, self.num_read = end - self.num_read, end
        return num_read

    def hear(self, token_ids: Sequence[int], automata: Sequence[SuffixAutomaton]) -> None:
        """Note what was generated, and follow it in the texts of others."""
        new = token_ids[self.said_end :]
        followed = {id(match.automaton): match for match in self.matches}
        self.matches = tuple(followed.get(id(one)) or Match(one) for one in automata)
        for match in self.matches:
            is_known = id(match.automaton) in followed
            for token_id in new if is_known else token_ids[-_CONTEXT:]:
                match.read(token_id)
            match.settle()
        self.said += new
        self.said_end = len(token_ids)


class SuffixProposer:
    """Implements `Proposer`: what most often followed the longest suffix that is known.

    Unlike those that look at one sequence alone, what it proposes depends on what was generated before.
    """

    def __init__(self, config: SuffixConfig) -> None:
        """Propose and remember as the configuration says."""
        self.capabilities = ProposerCapabilities(name=_METHOD, shape=config.shape)
        self._config = config
        self._shared = SharedTexts(config.num_shared_tokens)
        self._texts: dict[RequestId, _Text] = {}

    @property
    def num_shared_tokens(self) -> int:
        """Tokens of ended requests that are kept."""
        return self._shared.num_tokens

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Look every sequence up; see the contract. Long texts are read over several calls."""
        proposals: dict[RequestId, Proposal] = {}
        self._shared.read(_MOST_READ)
        left = _MOST_READ
        for sequence in sequences:
            text = self._text_of(sequence)
            left -= text.read(
                sequence.token_ids, self._start_of(sequence.committed_len), max(left, _ALWAYS_READ)
            )
            text.hear(sequence.token_ids, self._shared.automata(text.salt))
            text.seen.update(sequence)
            budget = num_draft_tokens.get(sequence.request_id, 0)
            if budget > 0 and (proposal := self._proposal(sequence, text, budget)) is not None:
                proposals[sequence.request_id] = proposal
        return proposals

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget these sequences, but for what they generated, as far as it was seen."""
        for request_id in request_ids:
            text = self._texts.pop(request_id, None)
            if text is not None:
                self._shared.learn(text.salt, text.said)

    def close(self) -> None:
        """Forget everything."""
        self._texts.clear()
        self._shared.clear()

    def _text_of(self, sequence: SequenceView) -> _Text:
        text = self._texts.get(sequence.request_id)
        if text is None or not text.seen.continues_in(sequence):
            text = self._texts[sequence.request_id] = _Text(sequence)
        return text

    def _start_of(self, length: int) -> int:
        """Return where the part of a text begins that is looked at: half of what may be, to all of it."""
        half = self._config.max_text_tokens // 2
        return 0 if length <= 2 * half else ((length - 1) // half - 1) * half

    def _proposal(self, sequence: SequenceView, text: _Text, budget: int) -> Proposal | None:
        length, automaton, state, method = 0, text.automaton, ROOT, _METHOD
        if text.num_read == sequence.committed_len:
            state = automaton.repeated
            length = automaton.length(state)
        for match in text.matches:
            if match.length > length:
                length, automaton, state, method = match.length, match.automaton, match.state, _SHARED_METHOD
        if length < self._config.min_match_tokens:
            return None
        num_tokens = min(budget, max(1, int(self._config.max_spec_factor * length)))
        found = self._continue(automaton, state, num_tokens)
        if not found.token_ids:
            return None
        return Proposal(
            request_id=sequence.request_id,
            committed_len=sequence.committed_len,
            prefix_hash=sequence.prefix_hash,
            token_ids=found.token_ids,
            parents=found.parents,
            method=method,
        )

    def _continue(self, automaton: SuffixAutomaton, state: int, num_tokens: int) -> Continuation:
        followers = partial(frequent_followers, automaton)
        continued = likely_tree if self._config.shape == "tree" else likely_chain
        return continued(followers, state, num_tokens, self._config.min_token_probability)


def frequent_followers(automaton: SuffixAutomaton, state: int) -> list[tuple[float, int, int]]:
    """Return (share, token, state) of what followed the strings of a state, the most frequent first.

    Where the text ends, what followed the longest suffix that occurred elsewhere: a repetition goes on.
    """
    while state > ROOT:
        found = [(automaton.count(target), target, token) for token, target in automaton.followers(state)]
        if len(found) == 1 and found[0][2] != NO_TOKEN:
            return [(1.0, found[0][2], found[0][1])]
        if found:
            total = sum(count for count, _, _ in found)
            found.sort(reverse=True)
            return [(count / total, token, target) for count, target, token in found if token != NO_TOKEN]
        state = automaton.link(state)
    return []
