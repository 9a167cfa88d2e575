"""The engine: requests in, outputs out, one round per step."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from specdec.core.clock import Clock, MonotonicClock
from specdec.core.description import TargetDescription
from specdec.core.error_codes import DISPLACED, INVALID_GRAMMAR, TARGET_LOST, TIMED_OUT
from specdec.core.errors import (
    CapacityError,
    ChannelClosed,
    ConfigError,
    InputError,
    LateError,
    TransportError,
)
from specdec.core.idle_work import IdleWork, idle_work_of
from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.build import EngineParts, build_parts
from specdec.engine.config import EngineConfig
from specdec.engine.metrics.engine_metrics import EngineMetrics
from specdec.engine.metrics.recent_share import RecentShare
from specdec.engine.offline import GenerationResult, Prompt, generate
from specdec.engine.requests.deadlines import Deadlines
from specdec.engine.requests.live_request import LiveRequest
from specdec.engine.requests.preparation import Preparation
from specdec.engine.requests.roster import Roster
from specdec.engine.rounds.round import RoundLoop
from specdec.engine.targets.target import Target
from specdec.engine.text.text_stream import Finish, StreamLimits, TextStream
from specdec.engine.text.tokenizer import Tokenizer
from specdec.kv.selection import KvBudgets, WrittenBudget
from specdec.model.checkpoint import LoadProgress
from specdec.proposers.base import Proposer, counters_of
from specdec.sampling.config import GrammarConfig
from specdec.sampling.grammar import GrammarCompiler
from specdec.scheduling.admission import (
    AdmissionLimits,
    check_in_time,
    check_queue,
    check_request,
    may_be_displaced,
    retry_after_s,
    without_misfits,
)
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.service_rates import Expectation, ServiceRates
from specdec.scheduling.speculation.controller import (
    FixedController,
    PicksDrafters,
    PicksKvBudgets,
    SpeculationController,
)
from specdec.scheduling.speculation.drafter_shares import DrafterSet
from specdec.scheduling.state import ServiceKey

_BEGUN_TURN = -1
"""Of what has begun elsewhere: as whoever is preempted here, it is before all that have not."""
_IDLE_PATIENCE_S = 0.01
"""How long a step without other work waits for a grammar."""
ABORTED = Finish(reason="abort")
_DISPLACED = Finish(
    reason="error",
    error="the queue is full, and this request was the last in it: another goes before it, by its "
    "priority or because this API key has more requests waiting",
    error_code=DISPLACED,
)


class Engine:
    """Generates with one target and one proposer. Not thread-safe; see `AsyncEngine`.

        with Engine(EngineConfig(target=ModelConfig(model="models/demo/target"))) as engine:
            for result in engine.generate(["def quicksort("], SamplingParams(max_tokens=64)):
                ...

    Every request that was accepted ends in exactly one output with a finish reason, whatever happens.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: LoadProgress | None = None,
        is_measuring: bool = False,
        around_drafter: Callable[[Proposer], Proposer] | None = None,
    ) -> None:
        """Load what `config` names; `progress` hears how far the target's loading is.

        Only who `is_measuring` may have output that is made up (`speculative_config.synthetic_acceptance`).
        What `around_drafter` makes of the drafter drafts in its place, and owns it.

        Raises:
            UserError: a checkpoint, a device or the memory is not as the configuration says.
        """
        parts = build_parts(config, progress, is_measuring=is_measuring, around_drafter=around_drafter)
        self._set_up(parts, MonotonicClock())

    @classmethod
    def from_parts(
        cls,
        *,
        target: Target,
        proposer: Proposer,
        tokenizer: Tokenizer,
        scheduler: SchedulerConfig | None = None,
        controller: SpeculationController | None = None,
        grammar: GrammarConfig | None = None,
        clock: Clock | None = None,
        prefix_caching: bool = True,
        max_branches: int = 4,
        kv_budgets: KvBudgets | None = None,
        drafters: DrafterSet | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Self:
        """Make an engine of parts that exist already; it closes target and proposer with itself.

        Without a controller, 4 tokens are drafted per sequence and round. `prefix_caching` is the target's
        `cache.enable_prefix_caching`, `max_branches` the drafter's key of that name; `kv_budgets` say how
        much drafts attend to, where there is a selection policy, `drafters` which ones requests may get,
        where `proposer` is several. `meanwhile` is called in every round while a target elsewhere is at work.
        """
        parts = EngineParts(
            target=target,
            proposer=proposer,
            tokenizer=tokenizer,
            scheduler=scheduler or SchedulerConfig(),
            controller=controller or FixedController(4),
            prefix_caching=prefix_caching,
            grammar=grammar or GrammarConfig(),
            max_branches=max_branches,
            kv_budgets=kv_budgets,
            drafters=drafters,
        )
        engine = cls.__new__(cls)
        engine._set_up(parts, clock or MonotonicClock(), meanwhile)
        return engine

    def _set_up(self, parts: EngineParts, clock: Clock, meanwhile: Callable[[], None] | None = None) -> None:
        description = parts.target.description
        self._parts = parts
        if parts.kv_budgets is not None and isinstance(parts.controller, PicksKvBudgets):
            parts.kv_budgets.pick = parts.controller.pick_kv_budget
        if parts.drafters is not None and isinstance(parts.controller, PicksDrafters):
            parts.drafters.pick = parts.controller.pick_drafter
        self._clock = clock
        self._idle_work = idle_work_of(parts.target, parts.proposer)
        self._metrics = EngineMetrics()
        self._target_share, self._draft_share = RecentShare(clock), RecentShare(clock)
        self._admission = AdmissionLimits(
            vocab_size=description.vocab_size,
            max_model_len=description.max_model_len,
            pool_tokens=(description.num_blocks - 1) * description.block_size,
            max_num_waiting=parts.scheduler.max_num_waiting,
            kv_budgets=parts.kv_budgets,
            drafters=parts.drafters,
        )
        self._stream_limits = StreamLimits(
            max_sequence_len=self._admission.max_sequence_len, eos_token_ids=description.eos_token_ids
        )
        self._roster = Roster(
            num_blocks=description.num_blocks,
            block_size=description.block_size,
            config=parts.scheduler,
            prefix_caching=parts.prefix_caching,
            num_rows_beside=parts.proposer.capabilities.num_rows_beside,
            max_sequence_len=self._admission.max_sequence_len,
        )
        self._rounds = RoundLoop(
            roster=self._roster,
            target=parts.target,
            proposer=parts.proposer,
            controller=parts.controller,
            metrics=self._metrics,
            clock=clock,
            max_branches=parts.max_branches,
            drafter_names=() if parts.drafters is None else parts.drafters.names,
            beside=self._do_beside,
        )
        self._meanwhile = meanwhile
        self._landed: tuple[list[RequestOutput], float, int, bool] | None = None
        """What the last round has brought, when, how many go on with a first token, whether anybody was left
        waiting; None once that is learnt from."""
        self._thread: int | None = None
        """Which has run the last step."""
        self._deadlines = Deadlines()
        self._grammars = GrammarCompiler(
            parts.tokenizer.to_json,
            vocab_size=description.vocab_size,
            eos_token_ids=description.eos_token_ids,
            config=parts.grammar,
        )
        self._preparation = Preparation(self._grammars)
        self._ended: list[RequestOutput] = []
        self._num_arrived = 0
        self._lost: TransportError | None = None
        self._closed = False
        self._rates = ServiceRates(parts.scheduler.max_num_seqs, clock.now_s())
        self._num_places: int | None = None
        """How many the last round ran, if it left somebody waiting: be it for K/V, there is room for no
        more. None: nobody waits."""
        """Whether somebody was left waiting by the last round."""

    @property
    def description(self) -> TargetDescription:
        """Facts about the loaded target."""
        return self._parts.target.description

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer."""
        return self._parts.tokenizer

    @property
    def max_sequence_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens: what both model and cache allow."""
        return self._admission.max_sequence_len

    @property
    def max_num_seqs(self) -> int:
        """Requests that run at once, at most."""
        return self._parts.scheduler.max_num_seqs

    @property
    def idle_work(self) -> tuple[IdleWork, ...]:
        """What makes target and proposer faster once it is done; `AsyncEngine` does it while idle."""
        return self._idle_work

    def warm_up(self) -> None:
        """Do all idle work now (compiling takes seconds), for those who would rather wait than start slow."""
        for work in self._idle_work:
            while work.pending():
                work.run_next()

    @property
    def has_work(self) -> bool:
        """Whether a step would bring anything."""
        return (
            bool(self._ended)
            or len(self._roster) > 0
            or len(self._preparation) > 0
            or self._rounds.num_in_flight > 0
        )

    @property
    def is_lost(self) -> bool:
        """Whether the target was lost: nothing can be served here any more."""
        return self._lost is not None

    @property
    def loss(self) -> TransportError | None:
        """How the target was lost, if it was."""
        return self._lost

    @property
    def draft_counters(self) -> Mapping[str, float]:
        """What the proposer counts, by metric name without prefix (any thread)."""
        return counters_of(self._parts.proposer)

    def metrics(self) -> EngineMetrics:
        """Return counters and current gauges; live, not a copy.

        Rounds and drafts are up to date in the thread that steps. What others see may lack the last round.
        """
        if self._thread == threading.get_ident():
            self._rounds.count()
        self._metrics.speculation = self._parts.controller.state
        self._metrics.num_running = len(self._roster.running)
        if self._parts.kv_budgets is not None:
            self._metrics.mean_kv_budget = self._mean_kv_budget(self._parts.kv_budgets)
        if self._parts.drafters is not None:
            names = self._parts.drafters.names
            running = [names[live.drafter] for live in list(self._roster.running.values())]
            self._metrics.num_running_by_drafter = Counter({**dict.fromkeys(names, 0), **Counter(running)})
        self._metrics.num_waiting = len(self._roster.waiting) + len(self._preparation)
        target_s = self._metrics.target_forward_s + self._metrics.target_sample_s
        self._metrics.target_utilization = self._target_share.take(target_s)
        if self._metrics.method != "none" and not self._metrics.drafts_elsewhere:
            self._metrics.local_draft_utilization = self._draft_share.take(self._metrics.draft_s)
        self._metrics.queue_wait_s = self._rates.wait_s(self._num_to_end_before(), self._tokens_to_come())
        self._metrics.kv_cache_usage = self._roster.kv_cache_usage
        return self._metrics

    def _mean_kv_budget(self, kv_budgets: KvBudgets) -> float | None:
        """Return the mean over running requests that have the drafter with budgets; None: there are none."""
        running = list(self._roster.running.values())
        if self._parts.drafters is not None:
            names = self._parts.drafters.names
            running = [live for live in running if kv_budgets.is_of(names[live.drafter])]
        budgets = [live.kv_budget for live in running]
        return sum(budgets) / len(budgets) if budgets else None

    def set_kv_budget(self, budget: WrittenBudget) -> None:
        """Change how much drafts attend to (`speculative_config.kv.budget`), from the next round on.

        An int is tokens, a float, or a text such as "5%", a share of the length. Requests with a budget of
        their own keep it. What is generated does not depend on it (any thread).

        Raises:
            ConfigError: there is no selection policy, or the budget does not hold the sink and a draft.
        """
        budgets = self._parts.kv_budgets
        if budgets is None:
            raise ConfigError("kv.budget: drafts attend to everything here: configure kv.policy first")
        try:
            budgets.set_default(budget)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def check_request(self, request: Request) -> None:
        """Check a request without taking it in.

        Raises:
            InputError: it can never be served here; names the field.
        """
        check_request(request, self._admission)
        if request.params.grammar is not None:
            self._grammars.check_size(request.params.grammar)

    def add_request(self, request: Request) -> None:
        """Take a request in. A newer epoch of a live request replaces it: the older one is aborted.

        Raises:
            InputError: it can never be served here, or an epoch as new is live already.
            CapacityError: the queue is full, with requests that are served before this one.
            LateError: it would not be served in the time that it gives (`scheduler.refuse_late`).
            TransportError: the target was lost; this engine serves nothing any more.
        """
        self._require_target()
        if request.goes_on:
            request = without_misfits(request, self._admission)
        self.check_request(request)
        current = self._find(request.request_id)
        if current is not None and current.request.epoch >= request.epoch:
            raise InputError(f"request id {request.request_id} is in use", param="request_id")
        try:
            expected = self._make_room(request, replacing=current)
        finally:  # be it refused: nobody hears of the older one any more
            self.abort(request.request_id)
        self._num_arrived += 1
        num_tokens = len(request.prompt_token_ids) + self._rates.expected_tokens(request)
        turn = self._roster.turns.take(request.owner, num_tokens, request.priority)
        if request.delivered_token_ids:
            turn = _BEGUN_TURN
        live = LiveRequest(
            request,
            service_key=ServiceKey(request.priority, turn, self._num_arrived),
            num_expected_tokens=num_tokens,
            table=self._roster.new_table(),
            text=TextStream(request, self._parts.tokenizer, self._stream_limits),
            arrival_s=self._clock.now_s(),
            kv_variants=self._parts.target.description.kv_variants,
            kv_budgets=self._parts.kv_budgets,
            drafters=self._parts.drafters,
        )
        if expected is not None and expected.wait_s > 0.0:
            live.stats.expected_first_token_s = expected.first_token_s
        self._metrics.prompt_tokens += live.num_prompt_tokens
        if live.finish is not None:  # a replay whose delivered tokens were all there is
            self._give_turn_back(live)
            self._count_finish(live.take_output(self._clock.now_s()))
        elif request.params.grammar is not None:
            self._preparation.add(live, request.params.grammar)
        else:
            self._roster.waiting.push(live)
        if live.finish is None and request.timeout_s is not None:
            self._deadlines.add(live.stats.arrival_s + request.timeout_s, live)

    def abort(self, request_id: RequestId, epoch: Epoch | None = None) -> None:
        """End a request early: its blocks are free at once, its last output comes with the next step.

        With `epoch`, only an attempt as old as that or older is ended. Unknown ids are ignored.
        """
        live = self._find(request_id)
        if live is not None and (epoch is None or live.request.epoch <= epoch):
            self._end(request_id, ABORTED)

    def about_to_begin(self) -> list[RequestId]:
        """Return the requests without a token so far that the next step may work on.

        They run, their grammar is being compiled, or there is a place for them. Whoever is to know afterwards
        what a step was about that ended this process has to be told before; some of them may go on waiting.
        """
        roster = self._roster
        running = roster.running.values()
        beginning = [live.request_id for live in running if live.stats.first_token_s is None]
        beginning.extend(live.request_id for live in self._preparation.begun)
        num_places = roster.max_num_seqs - len(running)
        if not roster.waiting:
            return beginning
        lowest = max((live.service_key.priority for live in running), default=0)
        for index, live in enumerate(roster.waiting):
            # Who waits takes a place that is free, or that of one that is less urgent.
            if index >= num_places and live.service_key.priority >= lowest:
                break
            beginning.append(live.request_id)
        return beginning

    def step(self, *, reads_text: bool = True) -> list[RequestOutput]:
        """Run one round and return what is new, at most one output per request and epoch.

        With `reads_text` false, outputs have their text only after `read_texts`: who delivers them while
        workers are busy with the next round can read it then.

        When the target is lost, every live request ends with error_code "target_lost"; by its delivered
        tokens each can go on in another engine. A request whose time is up ends with "request_timeout" before
        the round, whether it waits or runs.
        """
        self._thread = threading.get_ident()
        if self._deadlines:
            self._end_overdue()
        if len(self._preparation) > 0:
            self._take_prepared()
        if len(self._roster) > 0 or self._rounds.num_in_flight > 0:
            try:
                outputs = self._rounds.run()
            except TransportError as error:
                self._lose_target(error)
            else:
                if reads_text:
                    self._rounds.read_texts()
                self._note_places(outputs)
                self._note_landed()  # of the round before, where none was launched since
                is_saturated = self._num_places is not None
                self._landed = outputs, self._clock.now_s(), self._num_decoding(), is_saturated
                if not self._parts.target.is_elsewhere or not self.has_work:
                    self._note_landed()
                self._ended.extend(outputs)
        if len(self._roster) == 0 and len(self._preparation) == 0:
            self._note_idle()
        ended, self._ended = self._ended, []
        return ended

    def read_texts(self) -> None:
        """Let the outputs of the last step have their text, if that is still to be read."""
        self._rounds.read_texts()

    def end_all(self, finish: Finish) -> None:
        """End every live request; the last outputs come with the next step."""
        for live in [*self._roster, *self._preparation]:
            self._end(live.request_id, finish)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[GenerationResult]:
        """Generate for all prompts and return the results in their order.

        Args:
            prompts: texts, or lists of token ids; a single one counts as a list of one.
            params: one for all, or one for each, which say all; None: as the checkpoint has it
                (`description.sampling_defaults`, whose `params` are those of who says only a part).
            progress: called with (finished, all) prompts whenever one finishes.

        Raises:
            InputError: naming what is wrong with a prompt or its parameters, before anything runs. A grammar
                that cannot be used is found later: its choices end with finish reason "error".
        """
        return generate(self, prompts, params, progress)

    def check_integrity(self) -> None:
        """Assert that queue, tables and allocator agree. Costs time linear in the pool."""
        self._roster.check_integrity()

    def close(self) -> None:
        """Free everything. Requests still live get no output. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._preparation.close()
        self._parts.proposer.close()
        self._parts.target.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self, request_id: RequestId) -> LiveRequest | None:
        roster = self._roster
        return (
            roster.running.get(request_id)
            or roster.waiting.get(request_id)
            or self._preparation.get(request_id)
        )

    def _make_room(self, request: Request, *, replacing: LiveRequest | None) -> Expectation | None:
        """See that a request may be taken in: if the queue is full, in the place of its last.

        What was promised to be served is taken in for all that wait, and what has begun goes before them.
        `replacing` is the older epoch, which leaves.

        Returns what it will experience; None where nobody is refused for that.
        """
        has_begun = bool(request.delivered_token_ids)
        turn = _BEGUN_TURN if has_begun else self._roster.turns.next_turn(request.owner, request.priority)
        key = ServiceKey(request.priority, turn, self._num_arrived + 1)
        num_others = len(self._roster) + len(self._preparation) - (replacing is not None)
        num_waiting = num_others + 1 - self._parts.scheduler.max_num_seqs
        leaving: LiveRequest | None = None
        expected: Expectation | None = None
        try:
            try:
                check_queue(num_waiting, self._admission, self._rates.seconds_per_request)
            except CapacityError:
                leaving = None if request.goes_on else self._displaced_by(key, request.owner)
                if leaving is None and not request.goes_on:
                    raise
            if self._parts.scheduler.refuse_late and not request.goes_on:
                num_before = self._num_to_end_before(key)
                expected = self._rates.expect(request, num_before, self._tokens_to_come())
                check_in_time(request, expected)
        except CapacityError as refusal:
            self._metrics.refusals["late" if isinstance(refusal, LateError) else "full"] += 1
            raise
        if leaving is not None:
            self._metrics.refusals["displaced"] += 1
            wait_s = retry_after_s(num_waiting, self._rates.seconds_per_request)
            self._end(leaving.request_id, replace(_DISPLACED, retry_after_s=wait_s))
        return expected

    def _num_to_end_before(self, key: ServiceKey | None = None) -> int:
        """How many have to end before one runs that comes now; 0 or less: there is a place for it.

        Without a key it is served last.
        """
        running, waiting = self._roster.running, self._roster.waiting
        places = self._num_places
        num_places = self._parts.scheduler.max_num_seqs if places is None else places
        num_before = len(running) + len(self._preparation)
        if key is None:
            return num_before + len(waiting) + 1 - num_places
        num_giving_way = sum(live.service_key.priority > key.priority for live in running.values())
        return num_before + waiting.num_before(key) + 1 - num_places - num_giving_way

    def _do_beside(self) -> None:
        """Do what has time until a target elsewhere is at work."""
        if self._meanwhile is not None:
            self._meanwhile()
        self._note_landed()

    def _note_places(self, outputs: list[RequestOutput]) -> None:
        """Note how many ran. Who has ended behind the round has left a place, which the next one fills."""
        num_ended = sum(output.finish_reason is not None for output in outputs)
        self._num_places = len(self._roster.running) + num_ended if self._roster.waiting else None

    def _note_idle(self) -> None:
        """Nobody is left, be it that all were taken back: nothing waits, and no time serves anybody."""
        self._note_landed()
        self._num_places = None
        self._roster.turns.note_idle()
        self._rates.note_idle()

    def _note_landed(self) -> None:
        """Learn from the last round how long requests take: of a target elsewhere, while it is at work."""
        landed, self._landed = self._landed, None
        if landed is not None:
            outputs, landed_s, num_decoding, is_saturated = landed
            self._note_first_tokens(outputs)
            self._rates.note_round(outputs, landed_s, num_decoding=num_decoding, is_saturated=is_saturated)

    def _note_first_tokens(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.first_index == 0 and output.token_ids:
                live = self._find(output.request_id)
                stats = output.stats if live is None else live.stats
                if stats is not None and stats.expected_first_token_s and stats.first_token_s is not None:
                    self._rates.note_first_token(
                        stats.expected_first_token_s, stats.first_token_s - stats.arrival_s
                    )

    def _num_decoding(self) -> int:
        return sum(live.sequence.num_generated > 0 for live in self._roster.running.values())

    def _tokens_to_come(self) -> list[int]:
        """How many tokens each of those who run is expected to generate yet (any thread).

        Places that are free while others wait are theirs from the next round on.
        """
        running = [
            max(0, live.num_expected_tokens - live.num_prompt_tokens - live.sequence.num_generated)
            for live in list(self._roster.running.values())
        ]
        num_free = 0 if self._num_places is None else self._num_places - len(running)
        return running + [self._rates.usual_tokens] * num_free

    def _displaced_by(self, key: ServiceKey, owner: str | None) -> LiveRequest | None:
        """Who leaves a full queue for a newcomer: its last, unless that has run or been promised to go on."""
        waiting = [self._roster.waiting.last, self._preparation.last]
        last = max(filter(None, waiting), key=lambda live: live.service_key, default=None)
        if last is None or last.stats.first_scheduled_s is not None or last.request.goes_on:
            return None
        is_same_owner = last.request.owner == owner
        return last if may_be_displaced(last, key, is_same_owner=is_same_owner) else None

    def _end(self, request_id: RequestId, finish: Finish) -> None:
        live = self._roster.remove(request_id) or self._preparation.remove(request_id)
        if live is not None:
            if live.stats.first_scheduled_s is None:
                self._give_turn_back(live)
            else:
                self._roster.settle_turn(live)
            self._rounds.release(request_id)
            self._rounds.read_texts()
            self._count_finish(live.end(finish, self._clock.now_s()))

    def _give_turn_back(self, live: LiveRequest) -> None:
        """Let the owner of a request that never ran go on as if it had not come."""
        request = live.request
        self._roster.turns.give_back(request.owner, live.num_expected_tokens, request.priority)

    def _end_overdue(self) -> None:
        for live in self._deadlines.take_due(self._clock.now_s()):
            self._metrics.num_timeouts += 1
            self._end(live.request_id, _overdue(live))

    def _take_prepared(self) -> None:
        """Let those wait for their turn whose grammar is compiled; end those whose grammar cannot be."""
        is_idle = not self._ended and len(self._roster) == 0
        for live, error in self._preparation.take_ready(_IDLE_PATIENCE_S if is_idle else 0.0):
            if error is None:
                self._roster.waiting.push(live)
            else:
                code = INVALID_GRAMMAR if isinstance(error, InputError) else error.code
                self._give_turn_back(live)
                finish = Finish(reason="error", error=str(error), error_code=code)
                self._count_finish(live.end(finish, self._clock.now_s()))

    def _count_finish(self, output: RequestOutput) -> None:
        assert output.finish_reason is not None
        self._metrics.finished[output.finish_reason] += 1
        self._ended.append(output)

    def _lose_target(self, error: TransportError) -> None:
        self._lost = error
        self._rounds.abandon()
        self.end_all(Finish(reason="error", error=f"the target was lost: {error}", error_code=TARGET_LOST))

    def _require_target(self) -> None:
        if self._closed:
            raise ChannelClosed("the engine is closed")
        if self._lost is not None:
            raise ChannelClosed(f"the target was lost: {self._lost}") from self._lost


def _overdue(live: LiveRequest) -> Finish:
    if live.stats.first_token_s is not None:
        where = f"{live.sequence.num_generated} tokens had been generated"
    elif live.stats.first_scheduled_s is not None:
        where = "its prompt was being read"
    else:
        where = "it waited in the queue"
    return Finish(reason="error", error=f"the request's time was up: {where}", error_code=TIMED_OUT)
