"""Suffix automaton: every substring, how often it occurs and what followed, against a search of the text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specdec.proposers.suffix_automaton import NO_TOKEN, ROOT, Match, SuffixAutomaton


def build(text: Sequence[int], *, most_links: int = 1 << 20) -> SuffixAutomaton:
    automaton = SuffixAutomaton(most_links=most_links)
    for token_id in text:
        automaton.append(token_id)
    return automaton


def state_of(automaton: SuffixAutomaton, string: Sequence[int]) -> int | None:
    state: int | None = ROOT
    for token_id in string:
        if state is None:
            return None
        state = automaton.step(state, token_id)
    return state


def occurrences(text: Sequence[int], string: Sequence[int]) -> int:
    return sum(list(text[at : at + len(string)]) == list(string) for at in range(len(text) - len(string) + 1))


def longest_known(text: Sequence[int], known: Sequence[int]) -> int:
    return max(size for size in range(len(text) + 1) if size == 0 or occurrences(known, text[-size:]))


def texts(seed: int) -> list[int]:
    generator = random.Random(seed)
    text = generator.choices(range(1 + seed % 4), k=generator.randint(1, 40))
    if seed % 3 == 0:
        text[len(text) // 2] = NO_TOKEN
    return text


@pytest.mark.parametrize("seed", range(24))
def test_it_knows_every_substring_and_its_count(seed: int) -> None:
    text = texts(seed)
    automaton = build(text)
    assert automaton.num_tokens == len(text)
    assert automaton.num_states <= 2 * len(text) + 1
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            state = state_of(automaton, text[start:end])
            assert state is not None
            assert automaton.count(state) == occurrences(text, text[start:end])
            assert {token for token, _ in automaton.followers(state)} == {
                text[at + end - start]
                for at in range(len(text) - end + start)
                if text[at : at + end - start] == text[start:end]
            }
    assert state_of(automaton, [*text, 99]) is None


@pytest.mark.parametrize("seed", range(24))
def test_it_says_how_much_of_the_end_occurred_before(seed: int) -> None:
    text = texts(seed)
    automaton = SuffixAutomaton()
    for end, token_id in enumerate(text, 1):
        automaton.append(token_id)
        before = longest_known(text[:end], text[: end - 1])
        assert automaton.length(automaton.repeated) == before


@pytest.mark.parametrize("most_links", [1, 2, 8])
def test_counts_that_are_owed_are_not_lost(most_links: int) -> None:
    """What a state lacks is what was counted below it, on the way of links, and waits there."""
    generator = random.Random(5)
    text = [1] * 30 + [token for _ in range(60) for token in generator.choice([[1, 2, 3], [1], [2]])]
    exact, carried = build(text), build(text, most_links=most_links)
    states = range(1, exact.num_states)
    waiting = [0] * exact.num_states
    for state in states:
        above = exact.link(state)
        while above > ROOT:
            waiting[above] += carried.owed(state)
            above = exact.link(above)
    assert any(waiting), "nothing was owed: no test"
    assert [carried.count(state) + waiting[state] for state in states] == [
        exact.count(state) for state in states
    ]


@pytest.mark.parametrize("period", [1, 2, 50])
def test_a_token_costs_the_same_at_any_length(period: int) -> None:
    """Steps, not seconds: states that appending and counting look at."""

    class Counted(SuffixAutomaton):
        __slots__ = ("num_steps",)

        def step(self, state: int, token_id: int) -> int | None:
            self.num_steps += 1
            return super().step(state, token_id)

    generator = random.Random(3)
    phrase = generator.choices(range(9), k=period)
    automaton = Counted()
    automaton.num_steps = 0
    steps = []
    for index in range(4000):
        automaton.append(phrase[index % period] if generator.random() < 0.97 else 10)
        if index % 2000 == 1999:
            steps.append(automaton.num_steps)
    assert steps[1] < 2.5 * steps[0]
    assert automaton.num_steps < 8 * 4000
    assert automaton.num_states < 2 * 4000


@pytest.mark.parametrize("seed", range(12))
def test_a_match_follows_both_texts(seed: int) -> None:
    generator = random.Random(seed)
    known, text = [], []
    automaton = SuffixAutomaton()
    match = Match(automaton)
    for _ in range(60):
        if generator.random() < 0.5:
            known.append(generator.randrange(3))
            automaton.append(known[-1])
            continue
        before = match.length
        text.append(generator.randrange(3))
        match.read(text[-1])
        match.settle()
        # What has come to be known behind the match is not looked for again.
        assert match.length <= min(before + 1, longest_known(text, known))
        assert match.state == (state_of(automaton, text[len(text) - match.length :]))
    grown, still = Match(automaton), longest_known(text, known)
    for token_id in text:
        grown.read(token_id)
    assert grown.length == still
