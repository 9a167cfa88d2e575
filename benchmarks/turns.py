"""Ways to decode that take turns, and are compared pair by pair."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.report import PairedRatio
from benchmarks.steady import Counted
from benchmarks.stolen import least_stolen

LIMIT = 0.97
"""Of a ratio that ought to be 1 or more; below it for sure, it fails."""


@dataclass(slots=True)
class Turns:
    """What was decoded, by variant: an entry for every turn."""

    counted: dict[str, list[Counted]] = field(default_factory=dict)
    stolen: dict[str, list[float]] = field(default_factory=dict)
    """Share of our cores' time that others had meanwhile."""

    @property
    def number(self) -> int:
        """Of the next turn: how many were taken."""
        return max(map(len, self.counted.values()), default=0)

    def take(self, variants: Mapping[str, Callable[[], Counted]]) -> None:
        """Have every variant decode once: in an order, the next time in the opposite one (ABBA).

        Every two turns another one begins. Else, of three, the one in the middle would always run behind
        another one, and the two others every other time behind themselves, which caches are not equal to.
        A turn that neighbours of a virtual machine have disturbed is taken again at once.
        """
        names = list(variants)
        first = self.number // 2 % len(names)
        order = names[first:] + names[:first]
        for name in order[:: 1 if self.number % 2 == 0 else -1]:
            measured = least_stolen(variants[name])
            self.counted.setdefault(name, []).append(measured.result)
            self.stolen.setdefault(name, []).append(measured.stolen)

    def rates(self, *names: str) -> dict[str, tuple[float, ...]]:
        """Return tokens per second of these variants, as far as they took part."""
        return {name: tuple(one.rate for one in self.counted[name]) for name in names if name in self.counted}

    @property
    def most_stolen(self) -> float:
        """The largest share of any turn: those of more than `stolen.MOST_STOLEN` could not be had calmer."""
        return max(itertools.chain.from_iterable(self.stolen.values()), default=0.0)

    def ratio(self, ours: str, theirs: str) -> PairedRatio:
        """Return how many times faster `ours` is, turn by turn."""
        pairs = zip(self.counted[ours], self.counted[theirs], strict=True)
        return PairedRatio(tuple(a.rate / b.rate for a, b in pairs))


def fails(ratio: PairedRatio) -> bool:
    """Whether a ratio is below the limit with 95 % confidence."""
    return ratio.upper < LIMIT
