"""The window of guesses, against iterations written down as the paper draws them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from specdec.proposers.lookahead.config import LookaheadConfig
from specdec.proposers.lookahead.window import advanced, begin, ngrams_of, rows_of
from specdec.tree.topology import topology_of
from tests.specdec.proposers.lookahead.answers import Say, answers_of, say_by_last

SIZES = [(1, 3), (2, 3), (5, 4), (4, 6), (7, 5)]


def say(text: Sequence[int]) -> int:
    return hash(tuple(text)) % 101


class Drawn:
    """Columns of tokens, each from level 0 up; column 0 begins with the last committed token."""

    def __init__(self, window_size: int, num_levels: int, guesses: Sequence[int], last_token: int) -> None:
        left = iter(guesses)
        first = [last_token, *(next(left) for _ in range(window_size - 1))]
        self.columns = [[token] for token in first]
        for _ in range(num_levels - 1):
            for column in self.columns:
                column.append(next(left))

    def say(self, text: Sequence[int], target: Say) -> list[int]:
        first = [column[0] for column in self.columns]
        return [
            target([*text[:-1], *first[: index + 1], *column[1:]])
            for index, column in enumerate(self.columns)
        ]

    def step(self, said: Sequence[int], last_token: int) -> list[tuple[int, ...]]:
        ngrams = [(*column, token) for column, token in zip(self.columns, said, strict=True)]
        self.columns = [list(ngram[1:]) for ngram in ngrams]
        self.columns[0][0] = last_token
        return ngrams


@pytest.mark.parametrize(("window_size", "ngram_size"), SIZES)
def test_is_what_the_paper_draws(window_size: int, ngram_size: int) -> None:
    rng = random.Random(window_size)
    text = rng.choices(range(101), k=6)
    config = LookaheadConfig(window_size=window_size, ngram_size=ngram_size)
    guesses = rng.choices(range(101), k=config.num_rows_beside)
    levels = begin(window_size, ngram_size, guesses)
    drawn = Drawn(window_size, ngram_size - 1, guesses, text[-1])
    for _ in range(20):
        rows = rows_of(levels)
        assert rows.num_rows == config.num_rows_beside
        assert rows.num_answered == window_size
        answers = answers_of(rows, text, say)
        assert answers == drawn.say(text, say)
        ngrams = ngrams_of(levels, text[-1], answers)
        text.append(say(text))
        assert ngrams == drawn.step(answers, text[-1])
        levels = advanced(levels, answers)


@pytest.mark.parametrize(("window_size", "ngram_size"), SIZES)
def test_positions_are_those_that_the_tokens_are_guesses_at(window_size: int, ngram_size: int) -> None:
    rows = rows_of(begin(window_size, ngram_size, range(window_size - 1 + (ngram_size - 2) * window_size)))
    depths = topology_of(rows.num_rows, rows.parents).depths
    expected = [*range(1, window_size)]
    for level in range(1, ngram_size - 1):
        expected += [level + column for column in range(window_size)]
    assert list(depths) == expected


def test_ngrams_are_what_the_target_says_once_the_first_guesses_are_gone() -> None:
    """But for the first column, whose first token is that of the text."""
    levels, last = begin(4, 5, range(50, 65)), 7
    for number in range(12):
        answers = answers_of(rows_of(levels), [last], say_by_last)
        ngrams = ngrams_of(levels, last, answers)
        follows = [
            all(say_by_last([one]) == other for one, other in itertools.pairwise(ngram))
            for ngram in ngrams[1:]
        ]
        assert all(follows) or number < 3
        assert number > 0 or not any(follows)
        last = say_by_last([last])
        levels = advanced(levels, answers)
