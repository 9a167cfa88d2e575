"""Grammars that say which tokens may come next, through the library llguidance.

A grammar's state is advanced by committed tokens only. The masks of a verified position are found by walking
the position's own drafted tokens from there, and going back.

Compiling happens in threads, after a trial in a process of its own (`grammar_trial`); it is bounded by
`GrammarConfig`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from specdec.core.error_codes import GRAMMAR_NOT_COMPILED
from specdec.core.errors import InputError, RequestFailed
from specdec.core.sampling_params import Grammar
from specdec.sampling.config import GrammarConfig
from specdec.sampling.grammar_library import compile_matcher, load_tokenizer, reason_of, require_library
from specdec.sampling.grammar_trial import GrammarTrial, TrialSetup
from specdec.sampling.mask_times import MaskTimes
from specdec.tree.topology import ROOT

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

_NUM_KEPT = 64
"""Compiled grammars that are kept for further requests."""
_HARMLESS = frozenset({"json_object", "choice"})
"""Kinds that need no trial."""


class Constrained(NamedTuple):
    """A draft that keeps to a grammar, and what may stand at the positions that verify it."""

    token_ids: tuple[int, ...]
    masks: tuple[bytes, ...]
    """One more than tokens: bit t (byte t // 8, from the low end) says whether token t may come next."""


class ConstrainedTree(NamedTuple):
    """What of a tree keeps to a grammar."""

    kept: tuple[int, ...]
    """Its nodes, in their order."""
    masks: tuple[bytes, ...]
    """One more: what may come behind the committed tokens, then behind each of these nodes."""


class GrammarState:
    """How far one stream has come in its grammar."""

    def __init__(
        self,
        grammar: Grammar,
        matcher: LLMatcher,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        mask_timeout_s: float,
    ) -> None:
        """`matcher`, made of `grammar`, is this state's own from now on; `vocab_size` is the model's."""
        self.grammar = grammar
        self.failure: str | None = None
        """Why the stream cannot go on, if so."""
        self._matcher = matcher
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._num_mask_bytes = -(-vocab_size // 8)
        self._mask: bytes | None = None
        """Of the committed tokens, once it is known."""
        self._mask_times = MaskTimes(mask_timeout_s)
        self._draft_times = MaskTimes(mask_timeout_s)
        """Apart from the others: which drafts there were must not decide whether the request goes on."""
        self._follows_drafts = self._will_follow_drafts = True

    @property
    def has_failed(self) -> bool:
        """Whether the stream cannot go on."""
        return self.failure is not None

    def commit(self, token_ids: Sequence[int]) -> None:
        """Go on by committed tokens, none of which ends the text."""
        self._mask = None
        self._follows_drafts = self._will_follow_drafts
        if self.failure is None and self._matcher.try_consume_tokens(list(token_ids)) != len(token_ids):
            self.failure = _reason(self._matcher) or "the text has left the grammar"

    def constrain(self, drafted: Sequence[int], room: int, *, is_sampled: bool = False) -> Constrained:
        """Cut a draft where the grammar forbids it, and add what the grammar forces.

        Args:
            drafted: proposed tokens, at most `room`.
            room: most tokens in the answer.
            is_sampled: the rule weighs what drafts were sampled from. Then a forbidden token has to be
                seen and rejected by the rule: it stays, as the last one, and nothing is added.
        """
        masks = [self._next_mask()]
        kept: list[int] = []
        if self.failure is not None or not self._follows_drafts:
            return Constrained((), tuple(masks))
        walker = self._matcher.deep_copy()
        is_ahead = False
        for token_id in drafted:
            if not self._walk(walker, token_id):
                break
            is_ahead = not self._keep(walker, token_id, kept, masks, is_sampled=is_sampled)
            if is_ahead:
                break
        if self.has_failed:
            return Constrained((), (self._next_mask(),))
        if is_sampled:
            if len(kept) == len(drafted):
                return Constrained(tuple(kept), tuple(masks))
            anything = b"\xff" * self._num_mask_bytes
            return Constrained((*kept, drafted[len(kept)]), (*masks, anything))
        # What is forced behind a token that was not kept is not forced here.
        for token_id in walker.compute_ff_tokens() if len(kept) < room and not is_ahead else ():
            # A tokenizer may know more tokens than the model has rows for.
            is_foreign = token_id >= self._vocab_size
            if len(kept) == room or is_foreign or not self._extend(walker, token_id, kept, masks):
                break
        return Constrained(tuple(kept), tuple(masks))

    def constrain_tree(
        self, drafted: Sequence[int], parents: Sequence[int], *, is_sampled: bool = False
    ) -> ConstrainedTree:
        """Leave out of a tree what the grammar forbids, with all that comes behind it.

        Args:
            drafted: token of each node.
            parents: as `Proposal.parents`.
            is_sampled: as for `constrain`: a forbidden node stays, without what comes behind it.
        """
        masks = [self._next_mask()]
        kept: list[int] = []
        walkers: dict[int, LLMatcher] = {ROOT: self._matcher}
        if self.failure is not None or not self._follows_drafts:
            return ConstrainedTree((), tuple(masks))
        for node, (token_id, parent) in enumerate(zip(drafted, parents, strict=True)):
            before = walkers.get(parent)
            if before is None:
                continue
            walker = before.deep_copy()
            reached: list[int] = []
            if self._extend(walker, token_id, reached, masks, is_sampled=is_sampled):
                walkers[node] = walker
            elif self.has_failed:
                return ConstrainedTree((), (self._next_mask(),))
            elif is_sampled:
                masks.append(b"\xff" * self._num_mask_bytes)
            else:
                continue
            kept.append(node)
        return ConstrainedTree(tuple(kept), tuple(masks))

    def allowed_after(self, drafted: Sequence[int]) -> bytes | None:
        """Return the mask behind drafted tokens; None when they are not allowed, or not followed any more."""
        if not drafted:
            return self._next_mask()
        if self.failure is not None or not self._follows_drafts:
            return None
        walker = self._matcher.deep_copy()
        if not all(self._walk(walker, token_id) for token_id in drafted):
            return None
        return self._draft_mask(walker)[0]

    def _extend(
        self,
        walker: LLMatcher,
        token_id: int,
        kept: list[int],
        masks: list[bytes],
        *,
        is_sampled: bool = False,
    ) -> bool:
        """Keep a draft token and the mask behind it, if it is allowed and that mask is to be had."""
        return self._walk(walker, token_id) and self._keep(
            walker, token_id, kept, masks, is_sampled=is_sampled
        )

    def _keep(
        self,
        walker: LLMatcher,
        token_id: int,
        kept: list[int],
        masks: list[bytes],
        *,
        is_sampled: bool,
    ) -> bool:
        """Keep a token that `walker` stands behind, if the mask there is to be had."""
        mask, failure = self._draft_mask(walker)
        if mask is None:
            if is_sampled:  # what was drawn must not be left out for what lies behind it
                self.failure = failure
            return False
        kept.append(token_id)
        masks.append(mask)
        return True

    def _walk(self, walker: LLMatcher, token_id: int) -> bool:
        """Go on by a token if it is allowed; the end of the text is never walked over.

        Walkers are copies: a matcher that is rolled back remembers masks of where it was (llguidance 1.9.1).
        """
        return token_id not in self._eos_token_ids and walker.try_consume_tokens([token_id]) == 1

    def _next_mask(self) -> bytes:
        """Return what may come next: nothing, once there is a failure."""
        if self.failure is None and self._mask is None:
            self._mask, self.failure, took_s = self._measured_mask(self._matcher)
            if self.failure is None and self._mask_times.is_too_long(took_s):
                self.failure = f"finding the allowed tokens took {took_s:.2f} s"
        if self.failure is None and self._mask is not None:
            return self._mask
        return bytes(self._num_mask_bytes)

    def _draft_mask(self, walker: LLMatcher) -> tuple[bytes | None, str | None]:
        """Return what a copy that has walked a draft allows, or why that cannot be said.

        A mask that was slow is a mask. Where such masks come again drafts are followed no more, but only from
        the next round on: dropping this round's for what they are would change what is sampled.
        """
        mask, failure, took_s = self._measured_mask(walker)
        if self._draft_times.is_too_long(took_s):
            self._will_follow_drafts = False
        return mask, failure

    def _measured_mask(self, matcher: LLMatcher) -> tuple[bytes | None, str | None, float]:
        """Return what `matcher` allows, or why that cannot be said, and the seconds of a CPU that it took."""
        # This thread's own time: that the machine was busy elsewhere must not end a request.
        started_s = time.thread_time()
        mask = bytearray(matcher.compute_bitmask()[: self._num_mask_bytes])
        took_s = time.thread_time() - started_s
        failure = _reason(matcher)
        if failure is not None:
            return None, failure, took_s
        may_end = matcher.is_accepting()
        for token_id in self._eos_token_ids:
            bit = 1 << (token_id & 7)
            mask[token_id >> 3] = mask[token_id >> 3] | bit if may_end else mask[token_id >> 3] & ~bit
        return bytes(mask), None, took_s


def _reason(matcher: LLMatcher) -> str | None:
    return reason_of(matcher) if matcher.is_error() else None


class _Vocabulary(NamedTuple):
    """What grammars are compiled for."""

    tokenizer: LLTokenizer
    setup: TrialSetup


class GrammarCompiler:
    """Compiles grammars for one vocabulary, in threads of its own."""

    def __init__(
        self,
        tokenizer_json: Callable[[], str | None],
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        config: GrammarConfig | None = None,
    ) -> None:
        """Start no thread yet.

        Args:
            tokenizer_json: gives the content of the model's tokenizer.json, None when it has none; called
                once, in a thread.
            vocab_size: tokens of the model.
            eos_token_ids: any of them ends a text.
            config: bounds.
        """
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._config = config or GrammarConfig()
        self._lock = threading.Lock()
        self._vocabulary: _Vocabulary | None = None
        self._matchers: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._idle_trials: list[GrammarTrial] = []
        self._is_closed = False
        self._threads = ThreadPoolExecutor(self._config.num_threads, thread_name_prefix="grammar")

    @property
    def num_threads(self) -> int:
        """Grammars that are compiled at once."""
        return self._config.num_threads

    def check_size(self, grammar: Grammar) -> None:
        """Check, at once, what needs no compilation.

        Raises:
            InputError: the grammar is too long, or grammars are not to be had here.
        """
        grammar.check_length(self._config.max_bytes)
        require_library(grammar)
        if not self._eos_token_ids:
            raise InputError(f"{grammar.param} needs a model with an end-of-text token", param=grammar.param)

    def begin(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> Future[GrammarState]:
        """Compile in a thread; the result has gone on by `token_ids` already.

        The future raises InputError: the grammar is malformed, too complex, or allows nothing; RequestFailed:
        it could not be tried or compiled, through no fault of its own.
        """
        try:
            return self._threads.submit(self._make, grammar, tuple(token_ids))
        except RuntimeError:
            if self._is_closed:
                raise
            logger.error("a grammar was not compiled: no thread could be started")
            failed: Future[GrammarState] = Future()
            failed.set_exception(_not_compiled(grammar))
            return failed

    def close(self) -> None:
        """Begin nothing more. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            trials, self._idle_trials = self._idle_trials, []
        for trial in trials:
            trial.close()

    def _make(self, grammar: Grammar, token_ids: tuple[int, ...]) -> GrammarState:
        try:
            return self._state_behind(grammar, token_ids)
        except InputError:
            raise
        except Exception as error:
            # The border of a thread: who asks for its result may end one request, and has others to serve.
            # Only the system's own words are shown: others may repeat what a client has sent.
            reason = error if isinstance(error, OSError) else type(error).__name__
            logger.error("a grammar was not compiled: %s", reason)
            raise _not_compiled(grammar) from error

    def _state_behind(self, grammar: Grammar, token_ids: tuple[int, ...]) -> GrammarState:
        state = GrammarState(
            grammar,
            self._matcher(grammar).deep_copy(),
            self._eos_token_ids,
            self._vocab_size,
            self._config.mask_timeout_s,
        )
        state.commit(token_ids)
        return state

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            matcher = self._matchers.get(grammar)
            if matcher is not None:
                self._matchers.move_to_end(grammar)
                return matcher
        vocabulary = self._load_vocabulary(grammar)
        if grammar.kind not in _HARMLESS:
            self._try(grammar, vocabulary.setup)
        matcher = compile_matcher(vocabulary.tokenizer, grammar, self._config.max_size)
        with self._lock:
            self._matchers[grammar] = matcher
            if len(self._matchers) > _NUM_KEPT:
                self._matchers.popitem(last=False)
        return matcher

    def _try(self, grammar: Grammar, setup: TrialSetup) -> None:
        with self._lock:
            trial = self._idle_trials.pop() if self._idle_trials else GrammarTrial(setup)
        try:
            trial.check(grammar)
        finally:
            with self._lock:
                is_closed = self._is_closed
                if not is_closed:
                    self._idle_trials.append(trial)
            if is_closed:
                trial.close()

    def _load_vocabulary(self, grammar: Grammar) -> _Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                text = self._tokenizer_json()
                if text is None:
                    raise InputError(
                        f"{grammar.param} is not supported with this tokenizer", param=grammar.param
                    )
                try:
                    tokenizer = load_tokenizer(text, self._vocab_size, self._eos_token_ids)
                except ValueError as error:
                    raise InputError(
                        f"{grammar.param} is not supported with this model's tokenizer: {error}",
                        param=grammar.param,
                    ) from error
                setup = TrialSetup(
                    tokenizer_json=text,
                    vocab_size=self._vocab_size,
                    eos_token_ids=self._eos_token_ids,
                    max_size=self._config.max_size,
                    max_memory_bytes=self._config.max_memory_bytes,
                    compile_timeout_s=self._config.compile_timeout_s,
                    mask_timeout_s=self._config.mask_timeout_s,
                )
                self._vocabulary = _Vocabulary(tokenizer, setup)
            return self._vocabulary


def _not_compiled(grammar: Grammar) -> RequestFailed:
    return RequestFailed(
        f"{grammar.param} could not be compiled now, though nothing is known to be wrong with it",
        code=GRAMMAR_NOT_COMPILED,
        param=grammar.param,
    )
