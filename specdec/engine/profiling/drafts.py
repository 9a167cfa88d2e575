"""Measures what drafts cost, before an engine takes requests; see `rounds`."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from specdec.core.clock import Clock
from specdec.core.ids import RequestId
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import TokenConstraint
from specdec.engine.profiling.plan import (
    LONG_CONTEXT,
    NUM_LONG,
    NUM_REPEATS,
    SHORT_CONTEXT,
    Deadline,
    ProfilePlan,
    middle,
    random_tokens,
)
from specdec.proposers.base import AsksAhead, Proposer, ProposerCapabilities
from specdec.scheduling.speculation.cost_profile import DraftPoint

_MOST_CALLS = 2 * NUM_REPEATS
"""Those that do not count included: not everybody had a proposal."""
_GROWTH = 2 * _MOST_CALLS
"""Tokens by which a sequence may grow while it is drafted for."""
_MOST_CATCH_UPS = 24
"""Answers in which a drafter may read its sequences before it proposes for all of them."""
_WAIT_S, _MOST_WAITS = 0.01, 50
"""One that has not answered is looked for again after so many seconds, so many times."""
_LEAST_WORK = 0.5
"""Share of the time that a drafter has to work for it to count as the one that took the time."""
_BEFORE_LONG = 4
"""Measurements that tell more than those of long contexts: one sequence, and many of them."""


class MadeUpSequence:
    """Implements `SequenceView` with random tokens. It grows as if they had been committed."""

    constraint: TokenConstraint | None = None
    owner: str | None = None
    kv_budget = 0

    def __init__(
        self,
        name: str,
        num_tokens: int,
        *,
        cache_salt: str,
        vocab_size: int,
        generator: np.random.Generator,
    ) -> None:
        """Begin with so many tokens of the first of a vocabulary."""
        self.request_id = RequestId(name)
        self.params = SamplingParams()
        self.seed = int(generator.integers(1 << 63))
        self.cache_salt: str | None = cache_salt
        self.num_prompt_tokens = num_tokens
        self.token_ids: list[int] = []
        self.prefix_hash = EMPTY_PREFIX
        self._generator = generator
        self._vocab_size = vocab_size
        self.grow(num_tokens)

    @property
    def committed_len(self) -> int:
        """Tokens that it has."""
        return len(self.token_ids)

    def grow(self, num_tokens: int) -> None:
        """Append random tokens."""
        added = random_tokens(self._generator, num_tokens, self._vocab_size)
        self.token_ids.extend(added)
        self.prefix_hash = extend_prefix_hash(self.prefix_hash, added)


class DraftShape(NamedTuple):
    """Proposals to be measured."""

    num_sequences: int
    is_long: bool
    num_steps: int


def budgets_to_measure(
    capabilities: ProposerCapabilities, plan: ProfilePlan, num_sequences: int
) -> tuple[int, ...]:
    """Return how many draft tokens proposals for so many sequences are measured with, what tells most first.

    Each token of a chain is a step: two numbers tell what all others take. A tree has a step for each level,
    so that its nodes cost much until it is as deep as it ever is, and little from there on: that is what the
    number between tells, beside the most that a round has rows for.
    """
    most = plan.max_draft_tokens
    if capabilities.shape == "chain":
        return tuple(dict.fromkeys((min(4, most), 1)))
    room = plan.max_num_batched_tokens // max(1, num_sequences) - 1
    most = max(1, min(most, room))
    levels = capabilities.tree_levels[:most]
    most = len(levels) or most
    first_deepest = 1 + levels.index(levels[-1]) if levels else most
    between = first_deepest if first_deepest < most else round(math.sqrt(most))
    return tuple(dict.fromkeys((most, 1, between)))


def shapes_to_measure(
    capabilities: ProposerCapabilities, plan: ProfilePlan, numbers: Sequence[int], num_long: int
) -> list[DraftShape]:
    """Return the proposals to be measured, those that tell most first: for so many sequences each, and for
    `num_long` with a long context (0: for none).
    """
    budgets = {number: budgets_to_measure(capabilities, plan, number) for number in numbers}
    shapes = [DraftShape(number, False, steps) for number in numbers for steps in budgets[number]]
    if num_long:
        own = budgets_to_measure(capabilities, plan, num_long)
        at = max(_BEFORE_LONG, sum(len(budgets[number]) for number in numbers[:2]))
        shapes[at:at] = [DraftShape(num_long, True, steps) for steps in own if steps > 1 or own == (1,)]
    return shapes


class KnownDrafts:
    """What was measured of a drafter at an earlier start."""

    def __init__(self, points: Sequence[DraftPoint], plan: ProfilePlan) -> None:
        self.points = tuple(points)
        short = plan.attended(SHORT_CONTEXT)
        self._shapes = {
            DraftShape(one.num_sequences, one.context_tokens > one.num_sequences * short, one.num_steps)
            for one in points
        }

    def missing(self, shapes: Sequence[DraftShape]) -> list[DraftShape]:
        """Return what has still to be measured, in the same order."""
        return [one for one in shapes if one not in self._shapes]


class MeasuredDrafts(NamedTuple):
    """What is known of a drafter at the end of a start."""

    points: tuple[DraftPoint, ...]
    is_complete: bool
    """Whether that is all there will be: what there was no time for is concluded from it, but not where the
    drafter was waited for instead."""


_Absence = Literal["late", "nothing"]
"""Why there is no measurement: no answer came, or none with proposals for all."""


class _Call(NamedTuple):
    """One call of a drafter."""

    work_s: float
    wire_s: float | None
    """What passed beside that; None: it does not tell them apart."""
    is_whole: bool
    """Whether everybody got a proposal who should."""
    is_answered: bool
    """Whether it has said so: who is late, or not there, has not."""


class DraftProfiler:
    """Times proposals of a drafter, which may have work for others, too: what counts is its own time.

    Only calls in which everybody gets a proposal say what that takes. A draft worker that was late once is
    not asked again at once, so that calls return in no time.
    """

    def __init__(
        self,
        proposer: Proposer,
        vocab_size: int,
        plan: ProfilePlan,
        clock: Clock,
        known: Sequence[DraftPoint] = (),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._proposer = proposer
        is_remote = proposer.capabilities.remote
        self._elsewhere = proposer if is_remote and isinstance(proposer, AsksAhead) else None
        self._known = KnownDrafts(known, plan)
        self._sleep = sleep
        self._worked_s = 0.0
        """What its work has taken so far."""
        self._vocab_size = vocab_size
        self._plan = plan
        self._clock = clock
        self._generator = np.random.default_rng(1)
        self._salt = secrets.token_hex(16)
        self._is_exact = proposer.capabilities.kv == "own"
        """Whether it has a proposal for every sequence that it has read."""

    def shapes(self) -> list[DraftShape]:
        """Return what is to be measured, those that tell most first."""
        capabilities, largest = self._proposer.capabilities, self._plan.max_num_seqs
        numbers = [number for number in dict.fromkeys((1, min(16, largest), 4, largest)) if number <= largest]
        shapes = shapes_to_measure(capabilities, self._plan, numbers, min(NUM_LONG, largest))
        limit = capabilities.max_context
        return [
            one
            for one in self._known.missing(shapes)
            if limit is None or self._context(one) + _GROWTH + one.num_steps <= limit
        ]

    def measure(self, deadline: Deadline, progress: Callable[[], None]) -> MeasuredDrafts:
        """Return what proposals took; nothing where the drafter has none, or is too slow."""
        points, started_s = list(self._known.points), self._clock.now_s()
        num_left = 0
        for shape in self.shapes():
            found = "late" if deadline.left_s <= 0.0 else self._point(shape, deadline)
            if isinstance(found, DraftPoint):
                points.append(found)
            elif not points:  # nobody drafts yet: the others would not either
                return MeasuredDrafts((), is_complete=False)
            num_left += found == "late"
            progress()
        least_work_s = _LEAST_WORK * (self._clock.now_s() - started_s)
        is_slow = deadline.left_s <= 0.0 and self._worked_s >= least_work_s
        return MeasuredDrafts(tuple(points), is_complete=num_left == 0 or is_slow)

    def _context(self, shape: DraftShape) -> int:
        """Long ones are as long as wanted, or as the drafter reads, where that is long, too."""
        if not shape.is_long:
            return SHORT_CONTEXT
        limit = self._proposer.capabilities.max_context
        wanted = self._plan.long_context
        return wanted if limit is None else max(LONG_CONTEXT, min(wanted, limit - _GROWTH - shape.num_steps))

    def _point(self, shape: DraftShape, deadline: Deadline) -> DraftPoint | _Absence:
        number, context = shape.num_sequences, self._context(shape)
        views = [
            MadeUpSequence(
                f"profile-{number}-{index}",
                context,
                cache_salt=self._salt,
                vocab_size=self._vocab_size,
                generator=self._generator,
            )
            for index in range(number)
        ]
        budgets = {view.request_id: shape.num_steps for view in views}
        try:
            calls = self._whole_calls(views, budgets, deadline)
        finally:
            self._proposer.release(list(budgets))
        if isinstance(calls, str):
            return calls
        return DraftPoint(
            num_sequences=number,
            context_tokens=number * self._plan.attended(context),
            num_steps=shape.num_steps,
            num_unseen=2,
            wire_s=min((call.wire_s for call in calls if call.wire_s is not None), default=0.0),
            seconds=max(middle([call.work_s for call in calls]), 1e-7),
        )

    def _whole_calls(
        self, views: Sequence[MadeUpSequence], budgets: dict[RequestId, int], deadline: Deadline
    ) -> list[_Call] | _Absence:
        """Return some calls, one at least, in which all get proposals: each behind two more tokens."""
        calls: list[_Call] = []
        has_caught_up = False
        for _ in range(_MOST_CALLS):
            if not has_caught_up:
                absence = self._catch_up(views, budgets, deadline)
                if absence is not None:
                    return calls or absence
            for view in views:
                view.grow(2)
            call = self._ask(views, budgets)
            has_caught_up = call.is_whole
            if call.is_whole:
                calls.append(call)
            if len(calls) == NUM_REPEATS or (calls and deadline.left_s <= 0.0):
                break
        return calls or "late"

    def _catch_up(
        self, views: Sequence[MadeUpSequence], budgets: dict[RequestId, int], deadline: Deadline
    ) -> _Absence | None:
        """Let the drafter read, until it proposes for all; say why, if it does not."""
        num_answers = num_waits = 0
        while num_answers < _MOST_CATCH_UPS:
            call = self._ask(views, budgets)
            if call.is_whole:
                return None
            if deadline.left_s <= 0.0 or num_waits == _MOST_WAITS:
                return "late"
            if call.is_answered:
                num_answers += 1
            else:
                num_waits += 1
                self._sleep(_WAIT_S)
        return "nothing"

    def _ask(self, views: Sequence[MadeUpSequence], budgets: dict[RequestId, int]) -> _Call:
        started_s = self._clock.now_s()
        found = self._proposer.propose(views, budgets)
        elapsed_s = self._clock.now_s() - started_s
        elsewhere = self._elsewhere
        work_s = 0.0 if elsewhere is None else elsewhere.take_drafting_s()
        # Nothing: it does not say. More than all together: that was another answer, heard meanwhile.
        tells_work = 0.0 < work_s <= elapsed_s
        is_answered = elsewhere is None or elsewhere.ready_s is not None
        if is_answered:
            self._worked_s += work_s if tells_work else elapsed_s
        num_own = sum(not one.is_fallback for one in found.values())
        return _Call(
            work_s=work_s if tells_work else elapsed_s,
            wire_s=elapsed_s - work_s if tells_work else None,
            is_whole=num_own == len(views) if self._is_exact else is_answered,
            is_answered=is_answered,
        )
