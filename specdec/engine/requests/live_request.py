"""One request inside an engine, from its acceptance to its last output."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from specdec.core.kv_variants import KvVariants
from specdec.core.outputs import RequestOutput, RequestStats, RoundTrace, TokenLogprobs
from specdec.core.plan import AdmittedSequence
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import Sequence as TokenSequence
from specdec.core.sequence import TokenConstraint
from specdec.engine.text.text_stream import Finish, TextStream
from specdec.kv.block_table import BlockTable
from specdec.kv.prefix_cache import PrefixTrail
from specdec.kv.selection import KvBudgets, read_budget
from specdec.sampling.grammar import GrammarState
from specdec.scheduling.speculation.drafter_shares import DrafterSet
from specdec.scheduling.state import ServiceKey

_PRESSED_SHARE = 0.5
"""Of the time that is given for a first token: from then on nobody's drafts make it later."""
_SCORED_CHUNK = 128
"""Prompt tokens read in one round where logits of all of them are wanted."""


class LiveRequest:
    """Tokens, blocks and text of one stream.

    It is what scheduling calls `Schedulable` and proposers `SequenceView`.
    """

    __slots__ = (
        "_drafters",
        "_kv_budgets",
        "_kv_variants",
        "_logprobs",
        "_num_reported",
        "_own_kv_budget",
        "_prompt_logprobs",
        "_text",
        "drafted_by",
        "finish",
        "generates",
        "grammar",
        "is_in_flight",
        "is_known_to_target",
        "kv_variant",
        "num_expected_tokens",
        "num_given_up",
        "own_drafter",
        "params",
        "request",
        "request_id",
        "requested_draft_tokens",
        "sequence",
        "service_key",
        "stats",
        "table",
        "told_len",
        "trail",
    )

    def __init__(
        self,
        request: Request,
        *,
        service_key: ServiceKey,
        table: BlockTable,
        text: TextStream,
        arrival_s: float,
        num_expected_tokens: int = 0,
        kv_variants: KvVariants | None = None,
        kv_budgets: KvBudgets | None = None,
        drafters: DrafterSet | None = None,
    ) -> None:
        """Take a request in. Tokens delivered by an earlier epoch are read, not reported again.

        `kv_variants` are those of `TargetDescription`, `kv_budgets` those of the engine (None: drafts attend
        to everything), `drafters` too (None: there is but one).
        """
        self.request = request
        self.request_id = request.request_id
        self._drafters = drafters
        self.own_drafter = None if drafters is None else drafters.own(request.request_id, request.drafter)
        """Which of several drafters it has, where nobody chooses; None: somebody does."""
        self.drafted_by: set[int] = set()
        """Which of several drafters have drafted for it."""
        self.service_key = service_key
        self.num_expected_tokens = num_expected_tokens
        """What it was thought to come to when it got its turn, prompt included."""
        self.requested_draft_tokens = request.num_draft_tokens
        self.table = table
        self.sequence = TokenSequence(request)
        self._kv_variants = kv_variants
        self._kv_budgets = kv_budgets
        self._own_kv_budget = None if request.kv_budget is None else read_budget(request.kv_budget)
        self.kv_variant = self._present_variant()
        """Which K/V it has in the target's cache, as long as it has any."""
        self.trail = PrefixTrail(request.cache_salt, self.kv_variant)
        self.stats = RequestStats(
            arrival_s=arrival_s,
            num_delivered_tokens=len(request.delivered_token_ids),
            trace=RoundTrace() if request.is_traced else None,
        )
        self.finish: Finish | None = None
        self.grammar: GrammarState | None = None
        """Set before the request runs, where it has one."""
        self.params = _without_text(request.params)
        """Sampling parameters as whoever samples needs them: that there is a grammar, not its text."""
        self.is_known_to_target = False
        """Whether the target keeps state of this request, which it has to be told to forget."""
        self.is_in_flight = False
        """Whether a round with it is being verified."""
        self.told_len = 0
        """Committed tokens when the proposer saw it last."""
        self.num_given_up = 0
        """Computed tokens lost by the last preemption, until it runs again."""
        self.generates = text.max_generated > 0
        """Whether any token is wanted behind the prompt."""
        self._text = text
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        """Entry i is that of prompt token i + 1; None when they are not wanted, or have been reported."""
        if request.params.prompt_logprobs is not None and not request.delivered_token_ids:
            self._prompt_logprobs = []
        self._logprobs: list[TokenLogprobs] = []
        self._num_reported = len(request.delivered_token_ids)
        for index, token_id in enumerate(request.delivered_token_ids):
            if text.finish is None:
                text.advance(token_id, index + 1)
        text.take()
        self.finish = text.finish

    @property
    def token_ids(self) -> Sequence[int]:
        """Committed tokens, prompt included."""
        return self.sequence.token_ids

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.sequence.num_prompt_tokens

    @property
    def committed_len(self) -> int:
        """Committed tokens, prompt included."""
        return self.sequence.committed_len

    @property
    def num_computed(self) -> int:
        """Leading committed tokens whose K/V are in the target's cache."""
        return self.sequence.num_computed

    @property
    def prefix_hash(self) -> int:
        """Hash of the committed tokens."""
        return self.sequence.prefix_hash

    @property
    def kv_budget(self) -> int:
        """Tokens that drafts may attend to, at present; 0: everything."""
        budgets = self._kv_budgets
        if budgets is None:
            return 0
        picked = None
        if budgets.pick is not None and not self.has_own_kv_budget:
            picked = budgets.pick(self.request_id, self.class_name)
        return budgets.tokens(self._own_kv_budget, self.committed_len, picked)

    @property
    def drafter(self) -> int:
        """Who drafts for it at present, of several; 0 where there is but one."""
        if self._drafters is None:
            return 0
        return self._drafters.of(self.own_drafter, self.request_id, self.class_name)

    @property
    def has_own_kv_budget(self) -> bool:
        """Whether the controller has no say in it: it was asked for, or set while the engine runs."""
        return self._own_kv_budget is not None or (self._kv_budgets is not None and self._kv_budgets.is_set)

    @property
    def draft_context(self) -> int:
        """Committed tokens that a draft attends to."""
        return min(self.kv_budget or self.committed_len, self.committed_len)

    @property
    def constraint(self) -> TokenConstraint | None:
        """What the grammar allows."""
        return self.grammar

    @property
    def seed(self) -> int:
        """Noise key of the stream."""
        return self.request.seed

    @property
    def cache_salt(self) -> str | None:
        """Only requests of one salt share cached K/V."""
        return self.request.cache_salt

    @property
    def owner(self) -> str | None:
        """Whose text it is."""
        return self.request.owner

    @property
    def class_name(self) -> str:
        """What kind of request it is."""
        return self.request.class_name

    @property
    def itl_s(self) -> float | None:
        """Longest time between two of its rounds that its client wants, in seconds; None: any."""
        return _seconds(None if self.request.slo is None else self.request.slo.itl_ms)

    @property
    def ttft_s(self) -> float | None:
        """How soon its first token is wanted, in seconds; None: no matter."""
        return _seconds(None if self.request.slo is None else self.request.slo.ttft_ms)

    def is_pressed(self, now_s: float) -> bool:
        """Whether time for its first token is running out, and not over."""
        if self.ttft_s is None or self.is_decoding or self.committed_len > self.num_prompt_tokens:
            return False
        return _PRESSED_SHARE * self.ttft_s <= now_s - self.stats.arrival_s < self.ttft_s

    @property
    def num_blocks(self) -> int:
        """KV blocks held."""
        return self.table.num_blocks

    @property
    def max_draft_tokens(self) -> int:
        """Draft tokens of use: a round adds one token beside the accepted ones."""
        limit = max(0, self._text.max_generated - self.sequence.num_generated - 1)
        if self._kv_variants is not None:
            left = self._kv_variants.num_tokens_left(self.committed_len)
            return limit if left is None else min(limit, left)
        return limit

    @property
    def has_outgrown_cache(self) -> bool:
        """Whether its K/V in the target's cache are of no use for a sequence of its length."""
        return self._kv_variants is not None and self._present_variant() != self.kv_variant

    @property
    def is_decoding(self) -> bool:
        """Whether all but its last committed token is in the target's cache."""
        return self.sequence.is_decoding

    @property
    def awaits_drafts(self) -> bool:
        """Whether its prompt is still being read and drafts are wanted after it."""
        return not self.sequence.is_decoding and self.requested_draft_tokens != 0

    @property
    def num_untold(self) -> int:
        """Committed tokens since the proposer saw it last; none if it is never to be drafted for."""
        return 0 if self.requested_draft_tokens == 0 else self.committed_len - self.told_len

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of prompt tokens are still missing."""
        return self._prompt_logprobs is not None and len(self._prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def max_chunk_tokens(self) -> int | None:
        """Few while logits of all rows are wanted: they are large."""
        return _SCORED_CHUNK if self.scores_prompt else None

    def scored_token_ids(self, end: int) -> tuple[int, ...]:
        """Return the prompt tokens whose log-probabilities the rows up to `end` (exclusive) give."""
        last = min(end + 1, self.num_prompt_tokens)
        return tuple(self.token_ids[self.num_computed + 1 : last]) if self.scores_prompt else ()

    def note_prompt_logprobs(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Take over what the rows from position `start` on say of the tokens behind them."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs[start:] = logprobs

    def admission(self, *, tells_tokens: bool) -> AdmittedSequence:
        """Return what the target must know of it before its first work.

        `tells_tokens`: whether its tokens are needed there, whatever its parameters.
        """
        params = self.params
        return AdmittedSequence(
            request_id=self.request_id,
            seed=self.seed,
            params=params,
            num_prompt_tokens=self.num_prompt_tokens,
            token_ids=tuple(self.token_ids) if tells_tokens or params.shapes_logits else (),
            kv_variant=self.kv_variant,
            cache_salt=self.sequence.cache_salt if tells_tokens else None,
        )

    def commit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, now_s: float) -> int:
        """Append verified tokens up to the first that ends the stream; return how many were kept.

        What comes after it reaches neither text nor counts nor log-probabilities.
        """
        num_before = self.sequence.num_generated
        num_kept = 0
        for token_id in token_ids:
            num_kept += 1
            self._text.advance(token_id, num_before + num_kept)
            if self._text.finish is not None:
                self.finish = self._text.finish
                break
        self.sequence.commit(token_ids[:num_kept])
        if self.grammar is not None and self.finish is None:
            self.grammar.commit(token_ids[:num_kept])
        if self.stats.first_token_s is None:
            self.stats.first_token_s = now_s
        if logprobs is not None:
            self._logprobs.extend(logprobs[:num_kept])
        return num_kept

    def preempt(self) -> None:
        """Give all blocks back; what is not found in the prefix cache later is computed again."""
        self.num_given_up = self.sequence.num_computed
        self.table.release()
        self.kv_variant = self._present_variant()
        self.trail.reset(self.kv_variant)
        self.sequence.evict()
        self.stats.num_preemptions += 1

    def _present_variant(self) -> int:
        if self._kv_variants is None:
            return 0
        return self._kv_variants.of(num_prompt_tokens=self.num_prompt_tokens, num_tokens=self.committed_len)

    def end(self, finish: Finish, now_s: float) -> RequestOutput:
        """End the stream from outside (abort, error) and return its last output."""
        self.finish = finish
        self._text.drain()
        return self.take_output(now_s)

    def take_text(self) -> str:
        """Return the text that is new since it was taken last, with an output or by itself."""
        return self._text.take()

    def take_output(self, now_s: float, *, with_text: bool = True) -> RequestOutput:
        """Return what is new since the last call; the last output when the stream has ended.

        Without text, that is for `take_text`.
        """
        first_index = self._num_reported
        sequence = self.sequence
        token_ids = tuple(sequence.token_ids[sequence.num_prompt_tokens + first_index :])
        logprobs: tuple[TokenLogprobs, ...] | None = None
        if self.request.params.logprobs is not None:
            logprobs = tuple(self._logprobs)
            self._logprobs.clear()
        prompt_logprobs = None
        if self._prompt_logprobs is not None and not self.scores_prompt:
            prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), None
        self._num_reported = first_index + len(token_ids)
        finish = self.finish
        if finish is not None:
            self.stats.finished_s = now_s
        return RequestOutput(
            request_id=self.request_id,
            epoch=self.request.epoch,
            first_index=first_index,
            token_ids=token_ids,
            text=self._text.take() if with_text else "",
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish.reason if finish else None,
            stop_reason=finish.stop_reason if finish else None,
            error=finish.error if finish else None,
            error_code=finish.error_code if finish else None,
            retry_after_s=finish.retry_after_s if finish else None,
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_generated_tokens=sequence.num_generated,
            stats=self.stats if finish else None,
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000.0


def _without_text(params: SamplingParams) -> SamplingParams:
    if params.grammar is None:
        return params
    return msgspec.structs.replace(params, grammar=msgspec.structs.replace(params.grammar, text=""))
