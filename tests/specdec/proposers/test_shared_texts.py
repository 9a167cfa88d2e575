"""Texts of ended requests: what is kept, for whom, and that it stays within its bound."""

from __future__ import annotations

import random

import pytest

from specdec.proposers import shared_texts
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
        assert 0 <= texts.num_tokens - kept <= 250, "not read yet"


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


def flood(texts: SharedTexts, step: int) -> list[int]:
    """Learn one of many texts of a salt, and return a string of it that is in no other."""
    first = 10_000 + 50 * step
    texts.learn("flood", range(first, first + 49))
    return [first + 3, first + 4]


def test_whoever_says_much_does_not_push_out_what_others_said() -> None:
    texts = SharedTexts(1000)
    for salt, first in (("one", 0), ("other", 500)):
        texts.learn(salt, range(first, first + 100))
        texts.read(1000)
    for step in range(200):
        said = flood(texts, step)
        texts.read(1000)
        assert texts.num_tokens <= 1000
    assert finds(texts, "one", [10, 11])
    assert finds(texts, "other", [510, 511])
    assert finds(texts, "flood", said)


@pytest.mark.parametrize("num_read", [0, 10])
def test_of_unread_texts_those_of_whoever_said_most_give_way(num_read: int) -> None:
    """Whether or not the oldest text, which is another's, has been read in part."""
    texts = SharedTexts(1000)
    texts.learn("quiet", range(50))
    texts.read(num_read)
    said = [flood(texts, step) for step in range(100)]
    assert texts.num_tokens <= 500 + num_read
    texts.read(10_000)
    assert finds(texts, "quiet", list(range(50))), "as one text"
    assert finds(texts, "flood", said[-1])
    assert not finds(texts, "flood", said[0])


def test_a_text_that_is_half_read_may_be_that_which_gives_way() -> None:
    texts = SharedTexts(1000)
    flood(texts, 0)
    texts.read(10)
    texts.learn("quiet", range(50))
    said = [flood(texts, step) for step in range(1, 100)]
    texts.read(10_000)
    assert finds(texts, "flood", [10_008, 10_009])
    assert not finds(texts, "flood", [10_009, 10_010]), "the rest had to go"
    assert finds(texts, "quiet", list(range(50)))
    assert not finds(texts, "flood", [10_009, said[-9][0] - 3]), "nor does the next one that is left go on"
    assert finds(texts, "flood", said[-1])


def test_of_several_who_say_much_each_keeps_the_latest() -> None:
    texts = SharedTexts(600)
    for step in range(60):
        for place, salt in enumerate("abc"):
            first = 10_000 * place + 20 * step
            texts.learn(salt, range(first, first + 19))
            texts.read(1000)
        for place, salt in enumerate("abc"):
            first = 10_000 * place + 20 * step
            assert finds(texts, salt, [first + 3, first + 4])


def test_salts_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests name them as they like."""
    monkeypatch.setattr(shared_texts, "_MOST_SALTS", 3)
    texts = SharedTexts(1000)
    for salt in "abc":
        texts.learn(salt, range(10))
        texts.read(1000)
    assert finds(texts, "a", [3, 4])
    texts.learn("d", range(10))
    texts.read(1000)
    assert [salt for salt in "abcd" if finds(texts, salt, [3, 4])] == ["a", "c", "d"]
    assert texts.num_tokens == sum(one.num_tokens for salt in "abcd" for one in texts.automata(salt))


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
