"""What a round costs: profiled points, and corrections by what rounds really take."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.corrections import Corrections
from specdec.scheduling.speculation.cost_profile import CostProfile, DraftPoint, VerifyPoint
from specdec.scheduling.speculation.draft_wire import DraftWire
from specdec.scheduling.speculation.time_spread import TimeSpread

Floats = NDArray[np.float64]

_MEASURED_WITHIN = 0.02
"""About how far, as a share, two measurements of one thing are apart."""
_SMALLEST_SHARE = 0.1
"""A step without any context costs at least this share of what was measured with some."""
_NODE = 0.02
"""What a further node of a tree is thought to cost, as a share of what a further level costs."""


class VerifyShape(NamedTuple):
    """A step of the target."""

    num_sequences: int
    context_tokens: float
    num_rows: int
    longer_context: float = 0.0
    """By how much contexts of draft rows are longer than the mean, all of them together."""


def _median(values: list[float]) -> float:
    values.sort()
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else 0.5 * (values[middle - 1] + values[middle])


def rising(values: Floats, weights: Floats) -> Floats:
    """Return the closest values, by weighted squares, that never fall (pool adjacent violators)."""
    if (values[1:] >= values[:-1]).all():
        return values
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        size = 1
        while pools and pools[-1][0] > value:
            before, before_weight, before_size = pools.pop()
            value = (before * before_weight + value * weight) / (before_weight + weight)
            weight, size = weight + before_weight, size + before_size
        pools.append((value, weight, size))
    result: Floats = np.repeat([value for value, _, _ in pools], [size for _, _, size in pools])
    return result


_CONTEXT_REGIONS = 8


def _context_region(context_tokens: float) -> int:
    """Four times the context is one region further; the first ends at 256 tokens."""
    return min(max(0, int(np.ceil(np.log2(max(context_tokens, 1.0) / 256.0) / 2.0))), _CONTEXT_REGIONS - 1)


class VerifyCost:
    """T_verify over rows: base(rows) + context * (a + b * rows per sequence), corrected by region.

    a is what reading the cache costs once per sequence, b what it costs again for every row.
    """

    def __init__(self, points: Sequence[VerifyPoint], max_rows: int, row_buckets: Sequence[int] = ()) -> None:
        """Fit measured points; tables have entries up to `max_rows`. See `TargetDescription.row_buckets`."""
        padded = _padded(np.arange(max_rows + 1), row_buckets)
        self._measured = np.array(sorted({point.num_rows for point in points}))
        self._knots = _finer(self._measured, row_buckets, int(padded[-1]))
        self._per_token, self._per_token_and_row, error = _context_slopes(points)
        self.own_context_s = max(0.0, self._per_token_and_row - error)
        """What a row costs by each token of its own sequence's context, so far as that is clear: seconds that
        `table` counts at the mean context of all. As it was measured at first."""
        self._base = self._fit_base(points)
        self._corrections = Corrections(len(self._knots), _CONTEXT_REGIONS)
        self._max_rows = max_rows
        self._left = np.clip(np.searchsorted(self._knots, padded, side="right") - 1, 0, len(self._knots) - 1)
        self._right = np.minimum(self._left + 1, len(self._knots) - 1)
        width = np.maximum(self._knots[self._right] - self._knots[self._left], 1)
        self._share = np.clip((padded - self._knots[self._left]) / width, 0.0, 1.0)
        self._nearest = np.where(self._share < 0.5, self._left, self._right)

    def table(self, num_sequences: int, context_tokens: float, *, is_overlapped: bool = False) -> Floats:
        """Return seconds by number of rows, [max_rows + 1]; positive, and never falling.

        With `is_overlapped`, of steps beside which the drafter works.
        """
        at_knots = self._at_knots(num_sequences, context_tokens)
        region = _context_region(context_tokens)
        at_knots = at_knots * self._corrections.factors(is_overlapped=is_overlapped)[:, region]
        at_knots = rising(at_knots, 0.2 + self._corrections.weights(is_overlapped=is_overlapped)[:, region])
        return self._between_knots(at_knots)

    def corrections_of(self, table: Floats, num_sequences: int, context_tokens: float) -> Floats:
        """Return by what a `table` of such steps is corrected, by number of rows: `own_context_s` is not."""
        corrections: Floats = table / self._between_knots(self._at_knots(num_sequences, context_tokens))
        return corrections

    def note(self, shape: VerifyShape, seconds: float, *, is_overlapped: bool = False) -> None:
        """Learn what a step took, alone or beside the drafter."""
        rows = min(shape.num_rows, self._max_rows)
        left, right = int(self._left[rows]), int(self._right[rows])
        low_s, high_s = self._at_knot(left, shape), self._at_knot(right, shape)
        expected = low_s + float(self._share[rows]) * (high_s - low_s)
        expected += self.own_context_s * shape.longer_context
        if expected > 0.0 and seconds > 0.0:
            region = _context_region(shape.context_tokens)
            at = int(self._nearest[rows])
            self._corrections.note(at, region, seconds / expected, is_overlapped=is_overlapped)

    def _between_knots(self, at_knots: Floats) -> Floats:
        between: Floats = at_knots[self._left] + self._share * (at_knots[self._right] - at_knots[self._left])
        return between

    def _at_knots(self, num_sequences: int, context_tokens: float) -> Floats:
        per_row = self._knots / max(num_sequences, 1)
        slopes = self._per_token + self._per_token_and_row * per_row
        at_knots: Floats = self._base + context_tokens * slopes
        return at_knots

    def _at_knot(self, knot: int, shape: VerifyShape) -> float:
        per_row = int(self._knots[knot]) / max(shape.num_sequences, 1)
        slope = self._per_token + self._per_token_and_row * per_row
        return float(self._base[knot]) + shape.context_tokens * slope

    def _fit_base(self, points: Sequence[VerifyPoint]) -> Floats:
        base = np.zeros(len(self._measured))
        for index, knot in enumerate(self._measured.tolist()):
            here = [point for point in points if point.num_rows == knot]
            fewest = min(point.context_tokens for point in here)
            values = [
                max(
                    point.seconds
                    - point.context_tokens
                    * (self._per_token + self._per_token_and_row * knot / point.num_sequences),
                    _SMALLEST_SHARE * point.seconds,
                )
                for point in here
                if point.context_tokens == fewest
            ]
            base[index] = _median(values)
        base = rising(base, np.ones(len(base)))
        fitted: Floats = np.interp(self._knots, self._measured, base)
        # Steps of more rows than were measured (time ran out) go on as between the largest and one of half
        # its size: of two that are close, the difference is noise.
        last = len(base) - 1
        half = max(0, int(np.searchsorted(self._measured, self._measured[last] / 2, side="right")) - 1)
        if half < last:
            slope = (base[last] - base[half]) / (self._measured[last] - self._measured[half])
            fitted += slope * np.maximum(self._knots - self._measured[last], 0)
        return fitted


def _padded(rows: NDArray[np.int64], row_buckets: Sequence[int]) -> NDArray[np.int64]:
    """Return as how many rows such numbers of them run."""
    if not row_buckets:
        return rows
    at = np.minimum(np.searchsorted(row_buckets, rows), len(row_buckets) - 1)
    padded: NDArray[np.int64] = np.maximum(rows, np.asarray(row_buckets)[at])
    return padded


def _finer(measured: NDArray[np.int64], row_buckets: Sequence[int], max_rows: int) -> NDArray[np.int64]:
    """Add numbers of rows between those that were measured, and above, for what rounds tell of them later."""
    between = [*range(1, 9), *(int(8 * 2 ** (step / 4)) for step in range(1, 64))]
    first, last = int(measured[0]), max(int(measured[-1]), max_rows)
    largest = max(row_buckets, default=0)
    there = [*row_buckets, *(rows for rows in between if rows > largest)]
    inside = [rows for rows in there if first < rows < last]
    finer: NDArray[np.int64] = np.unique(np.concatenate((measured, inside, [last])).astype(np.int64))
    return finer


def _context_slopes(points: Sequence[VerifyPoint]) -> tuple[float, float, float]:
    """Return the cost of a token of context per step, and per row of its sequence; neither is negative.

    And how far the latter may be off, by what measurements vary.
    """
    slopes: list[tuple[float, float, float]] = []
    by_shape: dict[tuple[int, int], list[VerifyPoint]] = {}
    for point in points:
        by_shape.setdefault((point.num_sequences, point.num_rows), []).append(point)
    for (num_sequences, num_rows), here in by_shape.items():
        low = min(here, key=lambda point: point.context_tokens)
        high = max(here, key=lambda point: point.context_tokens)
        if high.context_tokens > low.context_tokens:
            rise = (high.seconds - low.seconds) / (high.context_tokens - low.context_tokens)
            error = _MEASURED_WITHIN * high.seconds / (high.context_tokens - low.context_tokens)
            slopes.append((num_rows / num_sequences, max(0.0, rise), error))
    if not slopes:
        return 0.0, 0.0, 0.0
    rows, rises, errors = np.array(slopes).T
    spread = float(((rows - rows.mean()) ** 2).sum())
    per_row = 0.0 if spread == 0.0 else float(((rows - rows.mean()) * (rises - rises.mean())).sum()) / spread
    per_row = min(max(per_row, 0.0), float((rises / rows).min()))
    error = 0.0 if spread == 0.0 else float(errors.max()) / math.sqrt(spread)
    return max(0.0, float((rises - per_row * rows).mean())), per_row, error


_STEP_REGIONS = 5
_CLEARLY_LESS = 0.8
"""Where a round read prompts, drafts that took less than this share of what was expected of them alone show
that they are cheaper."""


def _step_region(num_steps: int) -> int:
    """1, 2-3, 4-7, 8-15, 16 and more."""
    return min(num_steps.bit_length() - 1, _STEP_REGIONS - 1)


class DraftCost:
    """T_draft: a start, and what each token costs by how many sequences have one, corrected by region; and
    the wire, which is learnt of its own.

    Of a chain each token is a step, and costs as much as the others. Of a tree each level is one: a node
    costs much where it is the first of its level, and little elsewhere.
    """

    def __init__(
        self,
        points: Sequence[DraftPoint],
        max_sequences: int,
        max_steps: int,
        tree_levels: Sequence[int] = (),
    ) -> None:
        """Fit measured points; tables have entries up to `max_sequences`, and `max_steps` draft tokens.

        `tree_levels` as `ProposerCapabilities.tree_levels`.
        """
        self._max_sequences = max_sequences
        places = _places(tree_levels, max(max_steps, *(point.num_steps for point in points)))
        self.per_token = _draft_context_slope(points)
        """What each token that a sequence attends to adds to a step, as measured."""
        self._reading = _context_reading(points, places)[:max_steps]
        """[K]: what a token of context costs for the first, the second, ... draft token."""
        self._per_unseen = _unseen_slope(points)
        self._knots, starts, steps = self._fit(points, places, max_steps)
        numbers = np.arange(max_sequences + 1)
        self._start = _over_sequences(numbers, self._knots, starts)
        self._steps = np.stack([_over_sequences(numbers, self._knots, one) for one in steps])
        """[K, sequences]: the rest of what each draft token costs, by how many have one."""
        self._steps[:, 0] = 0.0
        self._tokens = np.arange(max_steps)
        self._corrections = Corrections(len(self._knots), _STEP_REGIONS)
        self._nearest = np.abs(np.log(np.maximum(numbers, 1))[:, None] - np.log(self._knots)).argmin(1)
        self._regions = np.array([_step_region(step) for step in range(1, max_steps + 1)])
        self._wire = DraftWire(min((point.wire_s for point in points), default=0.0))
        self.spread = TimeSpread()
        """Of the times after which proposals are there, beyond what `by_steps` says."""

    def per_sequence_s(self, num_sequences: int) -> float:
        """Return what one more sequence adds to a step of about so many, beside its context, as measured."""
        number = min(max(num_sequences, 2), self._max_sequences)
        return float((self._steps[:, number] - self._steps[:, 1]).mean()) / max(1, number - 1)

    def correction(self, num_sequences: int) -> float:
        """Return how many times as long drafting for so many takes as it was measured, the mean over all
        lengths of drafts.
        """
        at = self._nearest[min(num_sequences, self._max_sequences)]
        return float(self._corrections.factors(is_overlapped=False)[at, self._regions].mean())

    def by_steps(
        self,
        taking_part: Floats | NDArray[np.int64],
        mean_context: Floats | float,
        *,
        is_overlapped: bool = False,
    ) -> Floats:
        """Return seconds of drafting for different numbers of tokens.

        Args:
            taking_part: [..., K]: how many sequences have a first, a second, ... token; never rising.
            mean_context: tokens that a sequence attends to; of all, or of those with each token: [..., K].
            is_overlapped: whether the target works at the same time.

        Returns:
            [..., K]: the time of the first 1 to K tokens; 0 where nobody takes part.
        """
        numbers = np.minimum(taking_part, self._max_sequences).astype(np.int64)
        tokens = self._tokens[: numbers.shape[-1]]
        seconds = self._steps[tokens, numbers] + (mean_context * self._reading[tokens]) * numbers
        first = numbers[..., :1]
        total: Floats = np.cumsum(seconds, axis=-1) + self._start[first]
        factors = self._corrections.factors(is_overlapped=is_overlapped)
        total *= factors[self._nearest[first], self._regions[: numbers.shape[-1]]]
        total = np.maximum.accumulate(total, axis=-1) + self._wire.seconds
        return np.where(first > 0, total, 0.0)

    def reading(self, num_tokens: float) -> float:
        """Return the seconds that reading so many committed tokens takes beyond one per sequence."""
        return self._per_unseen * max(0.0, num_tokens)

    def note(
        self,
        budgets: Mapping[RequestId, int],
        mean_context: float,
        num_branches: int,
        ready_s: float,
        *,
        work_s: float | None = None,
        is_overlapped: bool = False,
        reads_prompts: bool = False,
    ) -> None:
        """Learn what proposals took, given the draft tokens asked for and continuations for each.

        Args:
            budgets: draft tokens by request.
            mean_context: of a draft token.
            num_branches: continuations of each request.
            ready_s: after which proposals were there.
            work_s: for which the drafter worked on them, of these; None: it does not say.
            is_overlapped: whether the target worked meanwhile.
            reads_prompts: whether it may have read prompts, too: drafting took that long at most.
        """
        wanted = sorted(budget for budget in budgets.values() if budget > 0)
        # A request may ask for longer drafts of its own than any that were measured.
        if not wanted or wanted[-1] > len(self._regions):
            return
        if work_s is None:
            work_s = ready_s - self._wire.seconds
        elif not reads_prompts:
            self._wire.note(ready_s - work_s)
        if work_s <= 0.0:
            return
        num_steps = wanted[-1]
        # Of each step, so many have been asked for no more than the steps before it.
        numbers = [
            min((len(wanted) - bisect_right(wanted, step)) * num_branches, self._max_sequences)
            for step in range(num_steps)
        ]
        expected = float(self._start[numbers[0]])
        expected += sum(
            float(self._steps[step, one]) + mean_context * float(self._reading[step]) * one
            for step, one in enumerate(numbers)
        )
        if expected > 0.0:
            at, region = int(self._nearest[numbers[0]]), _step_region(num_steps)
            if reads_prompts:
                factor = self._corrections.factors(is_overlapped=is_overlapped)[at, region]
                if work_s > _CLEARLY_LESS * expected * factor:
                    return
            surprise = self._corrections.note(at, region, work_s / expected, is_overlapped=is_overlapped)
            if not reads_prompts:
                self.spread.note(ready_s / (work_s / surprise + self._wire.seconds))

    def _fit(
        self, points: Sequence[DraftPoint], places: Floats, max_steps: int
    ) -> tuple[Floats, Floats, Floats]:
        """Return numbers of sequences, [N], what drafting for so many begins with, [N], and what each token
        adds, [K, N].
        """
        lines = _by_sequences(points)
        starts: list[float] = []
        steps: list[Floats] = []
        for line in lines.values():
            seconds = np.maximum.accumulate([point.seconds for point in line.values()])
            added = _added(np.array(list(line)), seconds, places)[:max_steps]
            short, first = next(iter(line.values())), float(added[0])
            start = short.seconds - short.num_steps * first
            starts.append(max(start, 0.0, _SMALLEST_SHARE * short.seconds - first))
            steps.append(np.maximum(added - short.context_tokens * self._reading, _SMALLEST_SHARE * added))
        weights = np.ones(len(lines))
        rising_steps = [rising(column, weights) for column in np.stack(steps, axis=1)]
        return np.array(list(lines)), rising(np.array(starts), weights), np.array(rising_steps)


def _by_sequences(points: Sequence[DraftPoint]) -> dict[int, dict[int, DraftPoint]]:
    """Return, by rising number of sequences, what was measured with the least context and the least to read:
    by rising number of draft tokens.
    """
    lines: dict[int, dict[int, DraftPoint]] = {}
    for number in sorted({point.num_sequences for point in points}):
        here = [point for point in points if point.num_sequences == number]
        fewest = min((point.num_unseen, point.context_tokens) for point in here)
        plain = [point for point in here if (point.num_unseen, point.context_tokens) == fewest]
        lines[number] = {}
        for point in sorted(plain, key=lambda point: point.num_steps):
            lines[number].setdefault(point.num_steps, point)
    return lines


def _places(tree_levels: Sequence[int], most: int) -> Floats:
    """Return how far drafting has come with 0, 1, ... `most` draft tokens: in steps, and a little for each
    node of a tree.
    """
    numbers = np.arange(most + 1, dtype=np.float64)
    if not tree_levels:
        return numbers
    levels = np.array([0, *tree_levels])[np.minimum(numbers, len(tree_levels)).astype(np.int64)]
    return levels + _NODE * numbers


def _added(budgets: NDArray[np.int64], totals: Floats, places: Floats) -> Floats:
    """Return what the first, the second, ... draft token adds, given `totals` of some budgets, never falling.

    What lies between two budgets is shared out by `places`; behind the last one it goes on as over all.
    """
    if len(budgets) == 1:
        return np.zeros(len(places) - 1)
    slopes = np.diff(totals) / np.diff(places[budgets])
    over_all = (totals[-1] - totals[0]) / (places[budgets[-1]] - places[budgets[0]])
    between = np.searchsorted(budgets, np.arange(1, len(places)))
    added: Floats = np.array([slopes[0], *slopes, over_all])[between] * np.diff(places)
    return added


def _over_sequences(numbers: NDArray[np.int64], knots: Floats, values: Floats) -> Floats:
    """Interpolate, and go on beyond the last knot as between the last two."""
    table: Floats = np.interp(numbers, knots, values)
    if len(knots) > 1:
        slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
        table = np.where(numbers > knots[-1], values[-1] + slope * (numbers - knots[-1]), table)
    return table


def _draft_context_slope(points: Sequence[DraftPoint]) -> float:
    """Return the cost of a token of context per step."""
    slopes = [rise / num_steps for num_steps, rise in _context_rises(points)]
    return _median(slopes) if slopes else 0.0


def _context_rises(points: Sequence[DraftPoint]) -> list[tuple[int, float]]:
    """Return the cost of a token of context for whole proposals, with their number of draft tokens."""
    by_shape: dict[tuple[int, int, int], list[DraftPoint]] = {}
    for point in points:
        by_shape.setdefault((point.num_sequences, point.num_steps, point.num_unseen), []).append(point)
    rises = []
    for (_, num_steps, _), here in by_shape.items():
        low = min(here, key=lambda point: point.context_tokens)
        high = max(here, key=lambda point: point.context_tokens)
        if high.context_tokens > low.context_tokens:
            rise = (high.seconds - low.seconds) / (high.context_tokens - low.context_tokens)
            rises.append((num_steps, max(0.0, rise)))
    return rises


def _context_reading(points: Sequence[DraftPoint], places: Floats) -> Floats:
    """Return the cost of a token of context for the first, the second, ... draft token."""
    rises: dict[int, list[float]] = {}
    for num_steps, rise in _context_rises(points):
        rises.setdefault(num_steps, []).append(rise)
    if not rises:
        return np.zeros(len(places) - 1)
    totals = [0.0, *(_median(rises[num_steps]) for num_steps in sorted(rises))]
    return _added(np.array([0, *sorted(rises)]), np.maximum.accumulate(totals), places)


def _unseen_slope(points: Sequence[DraftPoint]) -> float:
    """Return the cost of reading one more committed token."""
    by_shape: dict[tuple[int, int], list[DraftPoint]] = {}
    for point in points:
        by_shape.setdefault((point.num_sequences, point.num_steps), []).append(point)
    slopes = []
    for (num_sequences, _), here in by_shape.items():
        low = min(here, key=lambda point: point.num_unseen)
        high = max(here, key=lambda point: point.num_unseen)
        if high.num_unseen > low.num_unseen:
            more = num_sequences * (high.num_unseen - low.num_unseen)
            slopes.append(max(0.0, (high.seconds - low.seconds) / more))
    return _median(slopes) if slopes else 0.0


class CostModel:
    """Costs of both sides."""

    def __init__(
        self,
        profile: CostProfile,
        *,
        max_rows: int,
        max_sequences: int,
        max_steps: int,
        num_drafters: int = 1,
        tree_levels: Sequence[Sequence[int]] = (),
    ) -> None:
        """Begin with a profile.

        Args:
            profile: measured, or `assumed_profile()`.
            max_rows: most rows of a round.
            max_sequences: most sequences, prepared continuations included.
            max_steps: longest proposal.
            num_drafters: those that the profile says nothing of are thought to cost what is usual.
            tree_levels: by drafter; see `DraftCost`. Those for which nothing is said draft chains.
        """
        self.verify = VerifyCost(profile.verify, max_rows, profile.row_buckets)
        known = [points or assumed_profile().draft for points in profile.drafts]
        known += [assumed_profile().draft] * (num_drafters - len(known))
        levels = [*tree_levels, *[()] * len(known)]
        self.drafts = tuple(
            DraftCost(points, max_sequences, max(1, max_steps), its_levels)
            for points, its_levels in zip(known, levels, strict=False)
        )
        """By drafter."""
        self.draft = self.drafts[0]


def assumed_profile() -> CostProfile:
    """Return what to begin with where nothing was measured: the shape of a small CPU; rounds correct the
    scale.
    """
    flat, growing = 16, (16, 64, 256, 1024)
    verify = [VerifyPoint(num_sequences=1, context_tokens=64, num_rows=1, seconds=0.01)]
    verify += [
        VerifyPoint(num_sequences=1, context_tokens=64, num_rows=rows, seconds=0.01 * rows / flat)
        for rows in growing
    ]
    draft = [
        DraftPoint(
            num_sequences=number,
            context_tokens=64 * number,
            num_steps=steps,
            num_unseen=1,
            seconds=0.001 * steps * max(1.0, number / flat),
        )
        for number in (1, 16, 256)
        for steps in (1, 4)
    ]
    return CostProfile(key="assumed", verify=tuple(verify), draft=tuple(draft))
