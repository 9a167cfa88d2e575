"""Texts of ended requests: what is kept, for whom, and that it stays within its bound."""

from __future__ import annotations

import random

import pytest

from specdec.proposers.shared_texts import SharedTexts
from specdec.proposers.suffix_automaton import Match


def finds(texts: SharedTexts, salt: str | None, string: list[int]) -> bool:
    for automaton in texts.automata(salt):
        match = Match(automaton)
        for token_id in string:
            match.read(token_id)
        if match.length == len(string):
            return True
    return False


def test_memory_is_bounded_whoever_fills_it() -> None:
    generator = random.Random(1)
    texts = SharedTexts(500)
    for step in range(400):
        texts.learn(generator.choice(["a", "b", "c", None]), generator.choices(range(50), k=step % 90))
        texts.read(generator.randint(0, 60))
        assert texts.num_tokens <= 500 + 250
        kept = sum(one.num_tokens for salt in ("a", "b", "c", None) for one in texts.automata(salt))
        assert kept <= 500


def test_whoever_was_here_least_recently_is_forgotten_first() -> None:
    texts = SharedTexts(100)
    for salt, first in (("a", 0), ("b", 100)):
        texts.learn(salt, range(first, first + 40))
        texts.read(1000)
    assert finds(texts, "b", [110, 111])
    assert finds(texts, "a", [10, 11])
    texts.learn("c", range(200, 240))
    texts.read(1000)
    assert not finds(texts, "b", [110, 111])
    assert finds(texts, "a", [10, 11])
    assert finds(texts, "c", [210, 211])


def test_of_one_salt_the_latest_half_is_always_there() -> None:
    texts = SharedTexts(200)
    for index in range(40):
        texts.learn(None, range(20 * index, 20 * index + 19))
        texts.read(1000)
        for back in range(min(index + 1, 4)):
            start = 20 * (index - back)
            assert finds(texts, None, [start + 3, start + 4])
    assert not finds(texts, None, [3, 4])


def test_texts_do_not_run_into_each_other() -> None:
    texts = SharedTexts(100)
    texts.learn(None, [1, 2, 3])
    texts.learn(None, [4, 5, 6])
    texts.read(1000)
    assert finds(texts, None, [1, 2, 3])
    assert finds(texts, None, [4, 5, 6])
    assert not finds(texts, None, [3, 4])


def test_what_is_given_up_half_read_does_not_run_into_the_next_text() -> None:
    texts = SharedTexts(100)
    texts.learn(None, range(50))
    texts.read(10)
    texts.learn(None, range(100, 120))
    texts.read(1000)
    assert finds(texts, None, [8, 9])
    assert not finds(texts, None, [10, 11]), "the rest had to go"
    assert finds(texts, None, [100, 101])
    assert not finds(texts, None, [9, 100])


def test_long_texts_are_read_in_parts() -> None:
    texts = SharedTexts(1000)
    texts.learn(None, range(100))
    texts.read(60)
    assert (finds(texts, None, [58, 59]), finds(texts, None, [59, 60])) == (True, False)
    texts.read(60)
    assert finds(texts, None, [58, 59, 60, 61])


@pytest.mark.parametrize("text", [[], [1]])
def test_nothing_is_learnt_from_nothing(text: list[int]) -> None:
    texts = SharedTexts(100)
    texts.learn(None, text)
    texts.read(10)
    assert texts.num_tokens == 0
