"""Grammars where drafts are made, away from the engine whose output keeps to them.

The engine's own masks decide what is verified. Here the same grammar is compiled once more, by the same
library under the same bounds, so that a draft model does not draft what is going to be cut. Drafting never
waits for it: without a grammar, not yet or not at all, drafts are only accepted less often.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future

from specdec.core.errors import InputError
from specdec.core.sampling_params import Grammar
from specdec.core.sequence import TokenConstraint
from specdec.sampling.grammar import GrammarCompiler, GrammarState

logger = logging.getLogger(__name__)


class DraftGrammars:
    """Gives sequences of other processes the masks of their grammars."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        """Compile with `compiler`, which is owned from now on."""
        self._compiler = compiler
        self.counters: Counter[str] = Counter()
        """grammar_failures: grammars that could not be compiled or followed here."""

    def follow(
        self, grammar: Grammar | None, token_ids: Sequence[int], num_prompt_tokens: int
    ) -> TokenConstraint | None:
        """Begin to compile a sequence's grammar; return what it allows, None when there is none.

        Args:
            grammar: in full.
            token_ids: committed tokens, prompt included; they may grow, and do not change.
            num_prompt_tokens: how many of them the grammar says nothing about.
        """
        if grammar is None:
            return None
        try:
            self._compiler.check_size(grammar)
        except InputError as error:
            self._note(error)
            return None
        return _FollowedGrammar(self, grammar, self._compiler.begin(grammar), token_ids, num_prompt_tokens)

    def close(self) -> None:
        """Compile nothing more. Idempotent."""
        self._compiler.close()

    def _note(self, failure: object) -> None:
        self.counters["grammar_failures"] += 1
        logger.info("drafting without a grammar: %s", failure)


class _FollowedGrammar:
    """Implements `TokenConstraint`: everything is allowed until it is compiled, and after a failure."""

    def __init__(
        self,
        owner: DraftGrammars,
        grammar: Grammar,
        compiled: Future[GrammarState],
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> None:
        self.grammar = grammar
        self._owner = owner
        self._compiled: Future[GrammarState] | None = compiled
        self._state: GrammarState | None = None
        self._token_ids = token_ids
        self._num_followed = num_prompt_tokens

    def allowed_after(self, drafted: Sequence[int]) -> bytes | None:
        """See `TokenConstraint.allowed_after`."""
        state = self._present()
        if state is None:
            return None
        mask = state.allowed_after(drafted)
        return None if self._has_failed(state) else mask

    def _present(self) -> GrammarState | None:
        """The grammar behind the committed tokens."""
        if self._compiled is not None and self._compiled.done():
            compiled, self._compiled = self._compiled, None
            try:
                self._state = compiled.result()
            except InputError as error:
                self._owner._note(error)
        state = self._state
        if state is None or self._num_followed >= len(self._token_ids):
            return state
        state.commit(self._token_ids[self._num_followed :])
        self._num_followed = len(self._token_ids)
        return None if self._has_failed(state) else state

    def _has_failed(self, state: GrammarState) -> bool:
        if state.failure is None:
            return False
        self._owner._note(state.failure)
        self._state = None
        return True
