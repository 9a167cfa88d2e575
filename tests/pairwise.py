"""Few combinations of many settings, in which every two values that go together meet."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

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


def mostly_full(values: Iterable[Any], always: Container[Any]) -> list[Any]:
    """Return parameters: those that are not `always` run are for the full run."""
    return [pytest.param(one, marks=[] if one in always else [pytest.mark.full]) for one in values]


def _draw(axes: Mapping[str, Sequence[Hashable]], fixed: Case, rng: random.Random) -> list[Case]:
    drawn = [{name: rng.choice(values) for name, values in axes.items()} for _ in range(_NUM_TRIES)]
    return [{**case, **fixed} for case in drawn]


def _pairs(case: Case) -> set[tuple[tuple[str, Hashable], tuple[str, Hashable]]]:
    return set(itertools.combinations(case.items(), 2))


def chosen_cover(cases: Sequence[Mapping[str, Any]], ways: int, *names: str) -> list[int]:
    """Return the indices of few cases in which all values (pairs if two `ways`, ...) of all of them occur.

    With `names`, only values whose names begin with one of them. Fields of dataclasses and mappings are
    values of their own (`parameter.field`). Greedy; of cases that bring as much, the first of those whose
    values were chosen least: always the same ones.
    """
    values_of = [
        [value for value in _values(case) if not names or value[0].startswith(names)] for case in cases
    ]
    missing_of = [set(itertools.combinations(values, min(ways, len(values)))) for values in values_of]
    num_uses: Counter[Hashable] = Counter()
    chosen: list[int] = []
    while any(missing_of):
        best = max(
            range(len(cases)),
            key=lambda index: (len(missing_of[index]), -sum(num_uses[value] for value in values_of[index])),
        )
        chosen.append(best)
        num_uses.update(values_of[best])
        found = set(missing_of[best])
        for missing in missing_of:
            missing -= found
    return sorted(chosen)


def _values(case: Mapping[str, Any]) -> list[tuple[str, type, Hashable]]:
    return [
        (name, type(value), value if isinstance(value, Hashable) else id(value))
        for name, value in sorted(_fields(case), key=lambda field: field[0])
    ]


def _fields(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            yield from _fields(inner, f"{prefix}{name}.")
        elif isinstance(value, Mapping) and value:
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
