"""Grammars where drafts are made, away from the engine whose output keeps to them.

The engine's own masks decide what is verified. Here the same grammar is compiled once more, by the same
library under the same bounds, so that a draft model does not draft what is going to be cut. Drafting never
waits for it: without a grammar, not yet or not at all, drafts are only accepted less often.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from specdec.core.errors import InputError, RequestFailed
from specdec.core.sampling_params import Grammar
from specdec.sampling.grammar import GrammarCompiler, GrammarState

logger = logging.getLogger(__name__)


class DraftGrammars:
    """Gives sequences of other processes the masks of their grammars.

    Those who own the sequences take turns: no more grammars are being compiled than there are threads, and
    the next one is of the owner who has the fewest under way. What waits belongs to sequences that are
    known here, so that an owner cannot have more of it than sequences.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        """Compile with `compiler`, which is owned from now on."""
        self._compiler = compiler
        self._lock = threading.RLock()
        self._waiting: OrderedDict[str, deque[FollowedGrammar]] = OrderedDict()
        """By owner, in the order of their turns."""
        self._is_beginning = False
        self._num_compiling: Counter[str] = Counter()
        self.counters: Counter[str] = Counter()
        """grammar_failures: grammars that could not be compiled or followed here."""

    @property
    def num_waiting(self) -> int:
        """Grammars that nobody has begun to compile (any thread)."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def follow(
        self, grammar: Grammar | None, token_ids: Sequence[int], num_prompt_tokens: int, owner: str
    ) -> FollowedGrammar | None:
        """Have a sequence's grammar compiled; return what it allows, None when there is none.

        Args:
            grammar: in full.
            token_ids: committed tokens, prompt included; they may grow, and do not change.
            num_prompt_tokens: how many of them the grammar says nothing about.
            owner: whose sequence it is, as by `core.ids.owner_of`.
        """
        if grammar is None:
            return None
        try:
            self._compiler.check_size(grammar)
        except InputError:
            self._note("it is too large here")
            return None
        followed = FollowedGrammar(self, owner, grammar, token_ids, num_prompt_tokens)
        with self._lock:
            self._waiting.setdefault(owner, deque()).append(followed)
            self._begin_more()
        return followed

    def close(self) -> None:
        """Compile nothing more. Idempotent."""
        with self._lock:
            self._waiting.clear()
            self._compiler.close()

    def _begin_more(self) -> None:
        """Begin what there is a thread for. The lock is held."""
        if self._is_beginning:
            return  # by the end of one that could not even begin: the loop below goes on
        self._is_beginning = True
        while self._waiting and self._num_compiling.total() < self._compiler.num_threads:
            owner = min(self._waiting, key=lambda one: self._num_compiling[one])
            queue = self._waiting[owner]
            followed = queue.popleft()
            if queue:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            self._num_compiling[owner] += 1
            followed._compiled = self._compiler.begin(followed.grammar)
            followed._compiled.add_done_callback(partial(self._compiled, owner))
        self._is_beginning = False

    def _compiled(self, owner: str, compiled: Future[GrammarState]) -> None:
        """Go on with the next one; called in a thread of the compiler."""
        with self._lock:
            self._num_compiling[owner] -= 1
            if not self._num_compiling[owner]:
                del self._num_compiling[owner]
            self._begin_more()

    def _forget(self, followed: FollowedGrammar) -> None:
        with self._lock:
            queue = self._waiting.get(followed.owner)
            if queue is not None and followed in queue:
                queue.remove(followed)
                if not queue:
                    del self._waiting[followed.owner]

    def _note(self, reason: str) -> None:
        """`reason` is in words of ours: an exception's would hold parts of what a client has sent."""
        self.counters["grammar_failures"] += 1
        logger.info("drafting without a grammar: %s", reason)


class FollowedGrammar:
    """Implements `TokenConstraint`: everything is allowed until it is compiled, and after a failure."""

    def __init__(
        self,
        grammars: DraftGrammars,
        owner: str,
        grammar: Grammar,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> None:
        self.owner = owner
        self.grammar = grammar
        self._grammars = grammars
        self._compiled: Future[GrammarState] | None = None
        """None before its turn, and once the state is there."""
        self._state: GrammarState | None = None
        self._token_ids = token_ids
        self._num_followed = num_prompt_tokens

    def close(self) -> None:
        """Compile it no more, if its turn has not come. Idempotent."""
        self._grammars._forget(self)

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
            except (InputError, RequestFailed):
                self._grammars._note("it cannot be compiled")
        state = self._state
        if state is None or self._num_followed >= len(self._token_ids):
            return state
        state.commit(self._token_ids[self._num_followed :])
        self._num_followed = len(self._token_ids)
        return None if self._has_failed(state) else state

    def _has_failed(self, state: GrammarState) -> bool:
        if state.failure is None:
            return False
        self._grammars._note("it failed on the way")
        self._state = None
        return True
