"""Guesses of verdicts: how they are shared out, how likely one is right, what is learnt of ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specdec.scheduling.speculation.guesses import GuessGains, GuessRanks, hit_table, share_guesses


def chance_of(accepted: list[float], rates: np.ndarray, fan_out: tuple[int, ...]) -> float:
    """The probability that a verdict is prepared for, by its definition."""
    reached, total = 1.0, 0.0
    num_pending = len(accepted) - 1
    for stand, number in enumerate(fan_out):
        is_whole = stand == num_pending
        here = reached if is_whole else reached * (1.0 - accepted[stand])
        chances = list(rates)
        if is_whole:
            chances = [accepted[stand], *rates]
        missed = 1.0
        for rank in range(number):
            missed *= 1.0 - chances[rank]
        total += here * (1.0 - missed)
        reached *= accepted[stand]
    return total


def fan_outs(num_lengths: int, num_guesses: int) -> list[tuple[int, ...]]:
    return [
        counts
        for counts in itertools.product(range(num_guesses + 1), repeat=num_lengths)
        if sum(counts) == num_guesses
    ]


@pytest.mark.parametrize("accepted", [[0.8, 0.7, 0.6], [0.3, 0.9, 0.5], [0.95] * 3, [0.1] * 3, [0.5]])
@pytest.mark.parametrize("num_guesses", [1, 2, 4, 6])
def test_guesses_are_shared_out_as_well_as_can_be(accepted: list[float], num_guesses: int) -> None:
    rates = GuessRanks().rates
    best = max(chance_of(accepted, rates, counts) for counts in fan_outs(len(accepted), num_guesses))
    shared = share_guesses(accepted, rates, num_guesses)
    assert sum(shared) == num_guesses
    assert chance_of(accepted, rates, shared) == pytest.approx(best)
    if len(accepted) > 1:
        worst = min(chance_of(accepted, rates, counts) for counts in fan_outs(len(accepted), num_guesses))
        assert worst < best - 0.01


def test_the_table_of_hits_is_that_of_the_best_shares() -> None:
    rates = GuessRanks().rates
    accepted = np.array([0.8, 0.6, 0.7, 0.4, 0.5])
    table = hit_table(accepted, rates, 6)
    for num_pending, num_guesses in itertools.product(range(5), range(1, 7)):
        chances = accepted[: num_pending + 1]
        shared = share_guesses(chances, rates, num_guesses)
        expected = chance_of(list(chances), rates, shared)
        assert table[num_pending, num_guesses - 1] == pytest.approx(expected)


def test_gains_add_up_to_one() -> None:
    """With every rank there is, some guess is right but for the tail of ranks that is not looked at."""
    gains = GuessGains([0.8, 0.6, 0.7], GuessRanks().rates)
    assert 0.85 < gains.behind(2).sum() <= 1.0 + 1e-9


def test_hit_rates_begin_as_measured() -> None:
    rates = GuessRanks().rates
    hits = 1.0 - np.cumprod(1.0 - rates)
    assert hits[[0, 2, 9]] == pytest.approx([0.325, 0.585, 0.80])
    assert (np.diff(hits) > 0).all()


def test_hit_rates_are_learnt_though_not_all_ranks_were_prepared() -> None:
    true = (0.6, 0.2, 0.1, 0.4)
    ranks = GuessRanks()
    generator = np.random.default_rng(1)
    for _ in range(4000):
        prepared = int(generator.integers(1, 5))
        rank = next((index for index in range(prepared) if generator.random() < true[index]), None)
        ranks.note(prepared, rank)
    assert ranks.rates[:4] == pytest.approx(true, abs=0.05)


def test_nothing_is_prepared_without_a_guess() -> None:
    assert share_guesses([0.5, 0.5], GuessRanks().rates, 0) == (0, 0)


@pytest.mark.parametrize("num_pending", [0, 1, 7])
def test_a_sure_drafter_prepares_for_full_acceptance(num_pending: int) -> None:
    shared = share_guesses([0.99] * (num_pending + 1), GuessRanks().rates, 2)
    assert shared[-1] >= 1
    hopeless = share_guesses([0.02] * (num_pending + 1), GuessRanks().rates, 2)
    assert hopeless[0] == 2
