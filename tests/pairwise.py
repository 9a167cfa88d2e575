"""Few combinations of many settings, in which every two values that go together meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Mapping, Sequence

Case = dict[str, Hashable]
_NUM_TRIES = 60


def pairwise_cover(
    axes: Mapping[str, Sequence[Hashable]], may_be: Callable[[Case], bool], seed: int = 0
) -> list[Case]:
    """Return cases, each a value by axis, in which all pairs of values occur that occur in any valid case.

    Greedy: each case begins with a pair that is missing, and is the best of some that are drawn.
    """
    rng = random.Random(seed)
    missing = {
        ((one, first), (other, second))
        for one, other in itertools.combinations(axes, 2)
        for first in axes[one]
        for second in axes[other]
    }
    cases: list[Case] = []
    while missing:
        wanted = min(missing, key=repr)
        best = max(
            (case for case in _draw(axes, dict(wanted), rng) if may_be(case)),
            key=lambda case: len(missing & _pairs(case)),
            default=None,
        )
        if best is None:
            missing.discard(wanted)  # the two do not go together
            continue
        cases.append(best)
        missing -= _pairs(best)
    return cases


def _draw(axes: Mapping[str, Sequence[Hashable]], fixed: Case, rng: random.Random) -> list[Case]:
    drawn = [{name: rng.choice(values) for name, values in axes.items()} for _ in range(_NUM_TRIES)]
    return [{**case, **fixed} for case in drawn]


def _pairs(case: Case) -> set[tuple[tuple[str, Hashable], tuple[str, Hashable]]]:
    return set(itertools.combinations(case.items(), 2))
