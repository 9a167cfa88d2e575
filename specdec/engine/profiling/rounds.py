"""Measures what rounds cost, before an engine takes requests: steps of the target, proposals of the drafter.

Both are used through their contracts, with made-up sequences of random tokens in real blocks: all blocks of
the target are free then, and what is written to them is overwritten by whoever gets them. Nothing stays
behind: both sides forget the sequences in the end, and what a drafter's prefix cache keeps of them is under
a salt that nobody else has, and gives way to others.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from specdec.core.clock import Clock, MonotonicClock
from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, SlotMove, TargetResult, TargetStep, TargetWork
from specdec.core.sampling_params import SamplingParams
from specdec.engine.profiling.drafts import (
    DraftProfiler,
    DraftShape,
    KnownDrafts,
    MeasuredDrafts,
    shapes_to_measure,
)
from specdec.engine.profiling.plan import (
    NUM_LONG,
    NUM_REPEATS,
    SHORT_CONTEXT,
    Deadline,
    ProfilePlan,
    middle,
    random_tokens,
)
from specdec.engine.targets.target import Target
from specdec.kv.block_table import num_blocks_for
from specdec.proposers.base import Proposer, ProposerCapabilities
from specdec.proposers.several.proposer import members_of
from specdec.scheduling.speculation.cost_profile import CostProfile, DraftPoint, VerifyPoint

ProfileProgress = Callable[[int, int], None]
"""Called with (measurements done, measurements planned)."""

_FILLED_CONTEXT = 1024
"""Of those with a long context: together more than caches hold, so that what is read comes from memory."""
_READ_TOKENS = 64
"""Tokens of a long context that are read; those behind them are copies."""
_MOVES_PER_STEP = 1024
_ROWS_PER_SEQUENCE = 4
"""About as many as verification has, where there are several sequences."""
_MOST_ROWS_PER_SEQUENCE = 16
_FIRST_ROWS = (1, 4, 16, 64, 8, 32, 128, 2, 256, 3, 6, 12, 24, 48, 96, 192, 384, 512, 5, 20, 40, 80, 160)
"""Numbers of rows, those that tell most first: time may run out."""
_VERIFY_SHARE = 0.6
"""Of the time, what steps of the target may take."""
_LONG_SHARE = 0.25
"""Of the time, what reading long contexts may take."""


@dataclass(slots=True, kw_only=True)
class _TargetSequence:
    """A made-up sequence in the target's cache."""

    request_id: RequestId
    context: int
    block_ids: tuple[int, ...]
    behind: tuple[int, ...]
    """Tokens behind the context: always the same, or whoever reads them would begin anew each time."""
    is_admitted: bool = False


@dataclass(slots=True)
class _Shape:
    """A step to be measured."""

    num_sequences: int
    num_rows: int
    is_long: bool = False


class TargetProfiler:
    """Times steps of a target that has no other work."""

    def __init__(self, target: Target, plan: ProfilePlan, clock: Clock, max_drafted: int = 0) -> None:
        """`max_drafted`: most tokens that the target drafts, and verifies, behind a sequence."""
        self._target = target
        self._plan = plan
        self._clock = clock
        self._generator = np.random.default_rng(0)
        self._step_ids = itertools.count()
        description = target.description
        self._variants = description.kv_variants
        self._vocab_size = description.vocab_size
        block_size, num_free = description.block_size, description.num_blocks - 1
        self._num_behind = max(_MOST_ROWS_PER_SEQUENCE, min(1 + max_drafted, description.max_model_len // 2))
        """Rows that have room behind a context."""
        room = description.max_model_len - self._num_behind
        self._short_context = max(1, min(SHORT_CONTEXT, room))
        num_short_blocks = num_blocks_for(self._short_context + self._num_behind, block_size)
        self._short = self._make(
            "short", min(plan.max_num_seqs, num_free // num_short_blocks), self._short_context, 1
        )
        first = 1 + len(self._short) * num_short_blocks
        long_blocks = (num_free - (first - 1)) // NUM_LONG
        context = min(
            max(_FILLED_CONTEXT, plan.long_context), room, long_blocks * block_size - self._num_behind
        )
        is_long = context >= 4 * self._short_context and plan.max_num_seqs >= NUM_LONG
        self._long = self._make("long", NUM_LONG, context, first) if is_long else []

    def measure(self, deadline: Deadline, progress: Callable[[], None]) -> list[VerifyPoint]:
        """Return what steps took, at least one, whatever the time."""
        budget_s = deadline.left_s
        points: list[VerifyPoint] = []
        for index, shapes in enumerate(self.shapes()):
            if points and deadline.left_s <= 0.0:
                break
            if len(shapes) > 1 and self._long and not self._long[0].is_admitted:
                self._fill_long(self._clock.now_s() + budget_s * _LONG_SHARE)
            there = [shape for shape in shapes if self._long or not shape.is_long]
            for point in self._points(there, deadline, repeats=1 if index == 0 else NUM_REPEATS):
                points.append(point)
                progress()
        return points

    def shapes(self) -> list[tuple[_Shape, ...]]:
        """Return the steps to measure, those that tell most first, and together those to be compared.

        What a token of context costs is a small difference of two steps: they take turns, or it would be the
        machine's own ups and downs.
        """
        first = _Shape(1, 1)  # once for nothing: what is done first is not what is done often
        pairs = [
            (_Shape(NUM_LONG, rows * NUM_LONG), _Shape(NUM_LONG, rows * NUM_LONG, is_long=True))
            for rows in ((1, 4) if self._long else ())
        ]
        sizes = [rows for rows in _FIRST_ROWS if rows <= self._plan.max_num_batched_tokens]
        plain = [
            (shape,)
            for shape in (_Shape(self._num_sequences(rows), rows) for rows in sizes)
            if shape.num_rows <= shape.num_sequences * _MOST_ROWS_PER_SEQUENCE
        ]
        return [(first,), *plain[:5], *pairs, *plain[5:]]

    def draft_shapes(self, capabilities: ProposerCapabilities, plan: ProfilePlan) -> list[DraftShape]:
        """Return the target's own drafts to measure, those that tell most first; `plan` is the drafter's."""
        number = len(self._short)
        numbers = tuple(dict.fromkeys((1, min(16, number), min(4, number), number)))
        plan = replace(plan, max_draft_tokens=min(plan.max_draft_tokens, self._num_behind - 1))
        return shapes_to_measure(capabilities, plan, numbers, NUM_LONG if self._long else 0)

    def draft_point(
        self, shape: DraftShape, plan: ProfilePlan, deadline: Deadline, drafter: int, *, reads: bool
    ) -> DraftPoint | None:
        """Return what the target's own drafts took, by itself; None where long contexts are given up.

        `plan` is that of the drafter, which is number `drafter` of those at the target; it may read the
        contexts first, some tokens in a step (`reads`).
        """
        number, is_long, num_steps = shape
        if is_long and self._long and not self._long[0].is_admitted:
            self._fill_long(self._clock.now_s() + max(0.0, deadline.left_s) * _LONG_SHARE)
        sequences = (self._long if is_long else self._short)[:number]
        if not sequences:
            return None

        def draft() -> TargetResult:
            works = [
                msgspec.structs.replace(
                    self._work(one, one.context, 1, 1),
                    num_self_drafted=num_steps,
                    kv_budget=0 if plan.kv_budget is None else plan.kv_budget.tokens(one.context),
                    drafter=drafter,
                )
                for one in sequences
            ]
            return self._answer(self._step(works, sequences))

        num_unread = sum(one.context + 1 for one in sequences) if reads else 0
        num_steps_to_read = -(-num_unread // self._plan.max_num_batched_tokens)
        for number_read in range(num_steps_to_read):
            if all(answer.drafted for answer in draft().results):
                break
            if is_long and number_read > 0 and deadline.left_s <= 0.0:
                return None
        seconds: list[float] = []
        while len(seconds) <= NUM_REPEATS:
            seconds.append(draft().draft_s)
            if len(seconds) >= 2 and deadline.left_s <= 0.0:
                break
        return DraftPoint(
            num_sequences=len(sequences),
            context_tokens=sum(plan.attended(one.context) for one in sequences),
            num_steps=num_steps,
            num_unseen=1,
            seconds=max(middle(seconds[1:]), 1e-7),
        )

    def forget(self) -> None:
        """Let the target forget the sequences."""
        admitted = tuple(one.request_id for one in (*self._short, *self._long) if one.is_admitted)
        if admitted:
            self._run(TargetStep(step_id=next(self._step_ids), works=(), released=admitted))

    def _num_sequences(self, num_rows: int) -> int:
        if num_rows <= self._plan.max_draft_tokens + 1:
            return 1
        return max(1, min(len(self._short), -(-num_rows // _ROWS_PER_SEQUENCE)))

    def _make(self, name: str, number: int, context: int, first_block: int) -> list[_TargetSequence]:
        num_blocks = num_blocks_for(context + self._num_behind, self._target.description.block_size)
        return [
            _TargetSequence(
                request_id=RequestId(f"profile-{name}-{index}"),
                context=context,
                block_ids=tuple(
                    range(first_block + index * num_blocks, first_block + (index + 1) * num_blocks)
                ),
                behind=tuple(random_tokens(self._generator, self._num_behind, self._vocab_size)),
            )
            for index in range(number)
        ]

    def _fill_long(self, end_s: float) -> None:
        """Put K/V of long contexts into memory; give them up if that takes too long.

        Reading as many tokens may take longer than all measurements: a few are read, and copied to all other
        slots. What they hold makes no difference to what reading them costs, but that they are there does:
        memory that was never written to is not what the machine reads.
        """
        first, context = self._long[0], self._long[0].context
        num_read = min(_READ_TOKENS, context, self._plan.max_num_batched_tokens)
        self._run(self._step([self._work(first, 0, num_read, 0)], [first]))
        chunk = _MOVES_PER_STEP // len(self._long)
        for start in range(0, context, chunk):
            if self._clock.now_s() > end_s:
                for one in self._long:
                    one.context = start
                break
            moves = tuple(
                SlotMove(self._slot(first, place % num_read), self._slot(one, place))
                for one in self._long
                for place in range(start, min(start + chunk, context))
                if one is not first or place >= num_read
            )
            self._run(TargetStep(step_id=next(self._step_ids), works=(), moves=moves))
        if self._long[0].context < 4 * self._short_context:
            self.forget()
            for one in (*self._short, *self._long):
                one.is_admitted = False
            self._long = []

    def _slot(self, one: _TargetSequence, place: int) -> int:
        block_size = self._target.description.block_size
        return one.block_ids[place // block_size] * block_size + place % block_size

    def _points(self, shapes: Sequence[_Shape], deadline: Deadline, repeats: int) -> list[VerifyPoint]:
        """Return what steps of these shapes take, in turn."""
        seconds: list[list[float]] = [[] for _ in shapes]
        for turn in range(repeats + 1):
            for shape, own in zip(shapes, seconds, strict=True):
                own.append(self._timed(shape))
            if turn >= 1 and deadline.left_s <= 0.0:
                break
        # The first time is left out: buffers grow, kernels are chosen.
        return [
            VerifyPoint(
                num_sequences=len(sequences := self._sequences(shape)),
                context_tokens=sum(one.context for one in sequences),
                num_rows=shape.num_rows,
                seconds=middle(own[1:] or own),
            )
            for shape, own in zip(shapes, seconds, strict=True)
        ]

    def _sequences(self, shape: _Shape) -> Sequence[_TargetSequence]:
        return (self._long if shape.is_long else self._short)[: shape.num_sequences]

    def _timed(self, shape: _Shape) -> float:
        sequences = self._sequences(shape)
        least, more = divmod(shape.num_rows, len(sequences))
        works = [
            self._work(one, one.context, number := least + (index < more), number)
            for index, one in enumerate(sequences)
        ]
        return self._run(self._step(works, sequences))

    def _step(self, works: Sequence[TargetWork], sequences: Sequence[_TargetSequence]) -> TargetStep:
        admitted = tuple(self._admission(one) for one in sequences if not one.is_admitted)
        for one in sequences:
            one.is_admitted = True
        return TargetStep(step_id=next(self._step_ids), works=tuple(works), admitted=admitted)

    def _admission(self, one: _TargetSequence) -> AdmittedSequence:
        variant = 0
        if self._variants is not None:
            variant = self._variants.of(num_prompt_tokens=one.context, num_tokens=one.context)
        return AdmittedSequence(
            request_id=one.request_id,
            seed=1,
            params=SamplingParams(),
            num_prompt_tokens=one.context,
            token_ids=tuple(random_tokens(self._generator, one.context, self._vocab_size)),
            kv_variant=variant,
        )

    def _work(self, one: _TargetSequence, start: int, num_rows: int, num_sampled: int) -> TargetWork:
        is_new = not one.is_admitted
        return TargetWork(
            request_id=one.request_id,
            token_ids=one.behind[:num_rows]
            if start == one.context
            else tuple(random_tokens(self._generator, num_rows, self._vocab_size)),
            start=start,
            num_sampled_rows=num_sampled,
            table_start=0 if is_new else len(one.block_ids),
            block_ids=one.block_ids if is_new else (),
        )

    def _run(self, step: TargetStep) -> float:
        started_s = self._clock.now_s()
        self._answer(step)
        return self._clock.now_s() - started_s

    def _answer(self, step: TargetStep) -> TargetResult:
        self._target.submit(step)
        return self._target.collect()


class SelfDraftProfiler:
    """Times the drafts of a target that drafts for itself, as it measures them itself."""

    def __init__(
        self,
        steps: TargetProfiler,
        capabilities: ProposerCapabilities,
        plan: ProfilePlan,
        known: Sequence[DraftPoint] = (),
        drafter: int = 0,
    ) -> None:
        """`drafter`: which it is of those at the target."""
        self._steps = steps
        self._drafter = drafter
        self._capabilities = capabilities
        self._known = KnownDrafts(known, plan)
        self._plan = plan

    def shapes(self) -> list[DraftShape]:
        """Return what is to be measured, those that tell most first; see `TargetProfiler.draft_shapes`."""
        return self._known.missing(self._steps.draft_shapes(self._capabilities, self._plan))

    def measure(self, deadline: Deadline, progress: Callable[[], None]) -> MeasuredDrafts:
        """Return what drafts took, of one more shape at least, whatever the time."""
        points = list(self._known.points)
        for place, shape in enumerate(self.shapes()):
            if place > 0 and deadline.left_s <= 0.0:
                break
            point = self._steps.draft_point(
                shape,
                self._plan,
                deadline,
                self._drafter,
                reads=len(self._capabilities.hidden_layers) > 0,
            )
            if point is not None:
                points.append(point)
            progress()
        return MeasuredDrafts(tuple(points), is_complete=True)


@dataclass(slots=True)
class _Counter:
    """Counts measurements for whoever wants to hear of them."""

    total: int
    progress: ProfileProgress | None
    done: int = field(default=0)

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


def drafts_anything(proposer: Proposer, plan: ProfilePlan) -> bool:
    """Whether there are proposals that could be measured: not from hidden states of made-up sequences."""
    capabilities = proposer.capabilities
    is_blind = capabilities.remote and len(capabilities.hidden_layers) > 0
    return capabilities.name != "none" and not is_blind and plan.max_draft_tokens > 0


def measure_profile(
    target: Target,
    proposer: Proposer,
    plan: ProfilePlan,
    *,
    known: CostProfile | None = None,
    clock: Clock | None = None,
    progress: ProfileProgress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> CostProfile:
    """Measure both sides, one after the other, for about `plan.budget_s` seconds.

    Neither may have any sequence. A single measurement is never cut short, so a slow machine takes longer.
    Where steps of the target are `known`, only proposals are measured: those that are not known, too.

    Raises:
        TransportError: the target is lost.
    """
    clock = clock or MonotonicClock()
    started_s = clock.now_s()
    members = members_of(proposer) if drafts_anything(proposer, plan) else ()
    grows_trees = any(one.capabilities.at_target and one.capabilities.shape == "tree" for one in members)
    steps = TargetProfiler(target, plan, clock, plan.max_draft_tokens if grows_trees else 0)
    none_known: list[tuple[DraftPoint, ...]] = [()] * len(members)
    known_drafts = none_known if known is None else [*known.drafts, *none_known]
    at_target = [place for place, one in enumerate(members) if one.capabilities.at_target]
    profilers = [
        SelfDraftProfiler(steps, one.capabilities, plan.of_drafter(place), points, at_target.index(place))
        if one.capabilities.at_target
        else DraftProfiler(one, target.description.vocab_size, plan.of_drafter(place), clock, points, sleep)
        for place, (one, points) in enumerate(zip(members, known_drafts, strict=False))
    ]
    num_planned = (sum(map(len, steps.shapes())) if known is None else 0) + sum(
        len(one.shapes()) for one in profilers
    )
    counter = _Counter(num_planned, progress)
    measured: list[MeasuredDrafts] = []
    try:
        for place, one in enumerate(profilers, start=1):
            share = plan.budget_s * (1.0 - _VERIFY_SHARE) * place / len(profilers)
            measured.append(one.measure(Deadline(clock, started_s + share), counter))
        first, *others = [one.points for one in measured] or [()]
        is_complete = all(one.is_complete for one in measured)
        if known is not None:
            return msgspec.structs.replace(
                known, draft=first, other_drafts=tuple(others), is_draft_complete=is_complete
            )
        verify = steps.measure(Deadline(clock, started_s + plan.budget_s), counter)
    finally:
        steps.forget()
    return CostProfile(
        key=plan.key,
        verify=tuple(verify[1:] or verify),
        draft=first,
        other_drafts=tuple(others),
        is_draft_complete=is_complete,
        row_buckets=target.description.row_buckets,
    )
