"""Scores of blocks: what counts, how much, and when it is looked at."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from specdec.kv.block_scores import DECAY, MAX_WINDOW, BlockScores, RunningScores, WindowScores


def rows(*columns: int, num_blocks: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """One row for each column, which has all of its mass."""
    masses = np.zeros((len(columns), num_blocks), np.float32)
    masses[np.arange(len(columns)), columns] = 1.0
    return masses


def values_of(scores: BlockScores) -> list[float]:
    assert scores.values is not None
    return scores.values.tolist()


@pytest.mark.parametrize("make", [WindowScores, RunningScores])
@pytest.mark.parametrize("interval", [1, 7, 40])
def test_a_new_sequence_has_none_and_its_prompt_is_looked_at(
    make: type[WindowScores | RunningScores], interval: int
) -> None:
    scores = make(interval)
    assert scores.values is None
    assert scores.num_wanted(0, 5) == 5
    assert scores.num_wanted(1000, 500) == MAX_WINDOW
    scores.learn(rows(1, 1, num_blocks=3), 10)
    assert scores.values is not None


def test_a_running_score_forgets_by_tokens() -> None:
    scores = RunningScores(1)
    scores.learn(rows(0, 1, num_blocks=2), 6)
    assert_allclose(values_of(scores), [DECAY, 1.0])
    scores.learn(rows(2, num_blocks=3), 7)
    assert_allclose(values_of(scores), [DECAY**2, DECAY, 1.0])


@given(
    columns=st.lists(st.integers(0, 4), min_size=2, max_size=30),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=30),
)
def test_rounds_do_not_show_in_running_scores(columns: list[int], cuts: list[int]) -> None:
    whole, parts = RunningScores(1), RunningScores(1)
    whole.learn(rows(*columns, num_blocks=5), len(columns))
    first = 0
    for length in [*cuts, len(columns)]:
        part = columns[first : first + length]
        if part:
            first += len(part)
            parts.learn(rows(*part, num_blocks=5), first)
    assert_allclose(values_of(parts), values_of(whole), rtol=1e-5, atol=1e-7)


def test_a_window_counts_as_a_whole_and_is_pooled() -> None:
    scores = WindowScores(32)
    scores.learn(rows(2, 2, 2, 2, num_blocks=5), 20)
    assert_allclose(values_of(scores), [0.0, 0.25, 0.5, 0.25, 0.0])


def test_a_window_is_scored_when_its_interval_is_over() -> None:
    scores = WindowScores(32)
    scores.learn(rows(*[0] * 8, num_blocks=6), 20)
    before = values_of(scores)
    scores.learn(rows(4, 4, num_blocks=6), 50)
    assert values_of(scores) == before
    scores.learn(rows(4, 4, num_blocks=6), 52)
    assert values_of(scores)[4] == 0.5
    assert values_of(scores)[0] == 0.0, "of what came before nothing is left"


def test_a_short_prompt_is_completed() -> None:
    """A prefix cache may leave one token of a prompt to read: better than nothing, and not for long."""
    scores = WindowScores(32)
    scores.learn(rows(0, num_blocks=4), 20)
    assert values_of(scores)[0] > 0.5
    assert scores.num_wanted(20, 3) == 3
    scores.learn(rows(3, 3, num_blocks=4), 22)
    assert values_of(scores)[3] > values_of(scores)[0] > 0.0
    assert scores.num_wanted(22, 3) == 3
    scores.learn(rows(3, num_blocks=4), 23)
    assert scores.num_wanted(23, 3) == 0, "the window is full"


@pytest.mark.parametrize(("interval", "window"), [(1, 1), (3, 1), (32, 4), (100, 12), (4000, 32)])
def test_what_is_not_needed_is_not_looked_at(interval: int, window: int) -> None:
    """A window is looked at once it begins, however many rows come with a draft."""
    scores = WindowScores(interval)
    scores.learn(rows(*[0] * 32, num_blocks=4), 50)
    first = 50 + interval - window
    assert [scores.num_wanted(start, 5) for start in (first - 1, first)] == [0, 5]
    assert scores.num_wanted(first, 5000) == MAX_WINDOW


def test_rounds_that_are_not_due_are_not_looked_at() -> None:
    running = RunningScores(8)
    running.learn(rows(0, num_blocks=4), 50)
    assert [running.num_wanted(start, 5) for start in (50, 56, 57)] == [0, 0, 5]
    every = RunningScores(1)
    every.learn(rows(0, num_blocks=4), 50)
    assert every.num_wanted(50, 5) == 5


@pytest.mark.parametrize(("make", "first"), [(WindowScores, 62), (RunningScores, 65)])
def test_in_company_half_of_the_interval_is_enough(
    make: type[WindowScores | RunningScores], first: int
) -> None:
    scores = make(32)
    scores.learn(rows(0, 0, 0, 0, num_blocks=4), 50)
    assert [scores.num_wanted(start, 5, is_early=True) for start in (first - 1, first)] == [0, 5]
    assert scores.num_wanted(first, 5) == 0
    scores.learn(rows(3, 3, 3, 3, num_blocks=4), first + 4)
    assert values_of(scores)[3] >= 0.5, "it has had its turn"
    assert scores.num_wanted(first + 5, 5, is_early=True) == 0


def test_a_window_is_one_piece() -> None:
    """Of what was looked at before a while without drafts nothing is in it, and after one it is not waited
    for the whole of it.
    """
    scores = WindowScores(32)
    scores.learn(rows(0, 0, 0, 0, num_blocks=4), 20)
    scores.learn(rows(1, 1, num_blocks=4), 50)
    assert values_of(scores)[0] > 0.5, "not yet"
    assert scores.num_wanted(70, 5) == 5
    scores.learn(rows(3, num_blocks=4), 71)
    assert_allclose(values_of(scores), [0.0, 0.0, 0.25, 0.75])
    assert scores.num_wanted(71, 5) == 5
    scores.learn(rows(3, 3, 3, num_blocks=4), 74)
    assert [scores.num_wanted(start, 5) for start in (74, 101, 102)] == [0, 0, 5]
