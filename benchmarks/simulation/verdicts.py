"""What the target makes of drafts, by chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.traffic import SimulatedRequest

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
FanOut = Callable[[SimulatedRequest, int], tuple[int, ...]]
"""(request, pending draft tokens) -> continuations behind each accept length."""

GUESS_RATES = np.array([0.35, 0.28, 0.22, 0.18] + [0.12] * 28)
"""Hit rate of guess r behind a rejected token, given that none before it was right: a trained pair shows .35,
.63 and .86 among the first 1, 3 and 10 at temperature 1."""
_FOUND_BY = 1.0 - np.cumprod(1.0 - GUESS_RATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRound:
    """One round of n decoding sequences, by chance. Arrays are [n]."""

    drafted: Ints
    accepted: Ints
    committed: Ints
    """New tokens, cut at the end of a request."""
    prepared: Ints | None = None
    """draft_ahead: continuations behind the verdict that came."""
    ranks: Ints | None = None
    """draft_ahead: which of them was right; 32 and more: none that was looked at."""
    num_branches: Ints | None = None
    """draft_ahead: all continuations asked for."""

    @property
    def num_rows(self) -> int:
        """Rows of the target."""
        return len(self.drafted) + int(self.drafted.sum())

    @property
    def hits(self) -> list[bool]:
        """Whose verdict had been prepared for."""
        if self.prepared is None or self.ranks is None:
            return [False] * len(self.drafted)
        return (self.ranks < self.prepared).tolist()


def play_round(
    requests: Sequence[SimulatedRequest],
    budgets: Ints,
    is_drafted: NDArray[np.bool_],
    fan_out: FanOut | None,
    generator: np.random.Generator,
) -> VerdictRound:
    """Draw one round.

    Args:
        requests: n sequences that decode.
        budgets: [n], draft tokens asked for.
        is_drafted: [n], whose proposals are there.
        fan_out: draft_ahead: continuations are prepared meanwhile.
        generator: of all chance.
    """
    chances = np.array([one.acceptance for one in requests])
    rest = np.array([one.num_to_generate - one.num_generated for one in requests])
    drafted = np.where(is_drafted, np.minimum(budgets, rest - 1), 0)
    luck = np.log(generator.random(len(requests)))
    stands = np.floor(luck / np.log(np.clip(chances, 1e-9, 1.0 - 1e-9))).astype(np.int64)
    accepted = np.minimum(stands, drafted)
    committed = np.minimum(accepted + 1, rest)
    if fan_out is None:
        return VerdictRound(drafted=drafted, accepted=accepted, committed=committed)
    prepared, branches = _fans(requests, drafted, accepted, budgets, fan_out)
    return VerdictRound(
        drafted=drafted,
        accepted=accepted,
        committed=committed,
        prepared=prepared,
        ranks=_ranks(accepted == drafted, chances, generator),
        num_branches=branches,
    )


def _fans(
    requests: Sequence[SimulatedRequest], drafted: Ints, accepted: Ints, wanted: Ints, fan_out: FanOut
) -> tuple[Ints, Ints]:
    prepared = np.zeros(len(requests), dtype=np.int64)
    branches = np.zeros(len(requests), dtype=np.int64)
    for at, (one, number, stands, budget) in enumerate(
        zip(requests, drafted.tolist(), accepted.tolist(), wanted.tolist(), strict=True)
    ):
        if budget > 0:
            fan = fan_out(one, number)
            prepared[at], branches[at] = fan[stands], sum(fan)
    return prepared, branches


def _ranks(is_whole: NDArray[np.bool_], chances: Floats, generator: np.random.Generator) -> Ints:
    """Return which guess is right: behind a proposal that stands, the first one is the next draft token."""
    number = len(chances)
    is_first = is_whole & (generator.random(number) < chances)
    ranks = np.searchsorted(_FOUND_BY, generator.random(number)) + is_whole
    return np.where(is_first, 0, ranks).astype(np.int64)
