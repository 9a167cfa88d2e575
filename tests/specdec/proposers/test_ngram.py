"""Prompt lookup: which continuation is found, against a search of the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specdec.proposers import ngram
from specdec.proposers.base import Proposer
from specdec.proposers.ngram import NgramProposer
from tests.specdec.proposers.contract import ProposerContract, view


def search(token_ids: Sequence[int], sizes: tuple[int, int], num_tokens: int) -> tuple[int, ...]:
    """The rule, slowly: longest n-gram first, latest occurrence, repeating where it overlaps the end."""
    length = len(token_ids)
    for size in range(sizes[1], sizes[0] - 1, -1):
        suffix = list(token_ids[length - size :])
        for end in range(length - 1, size - 1, -1):
            if list(token_ids[end - size : end]) == suffix:
                text = list(token_ids)
                while len(text) < end + num_tokens:
                    text.append(text[len(text) - (length - end)])
                return tuple(text[end : end + num_tokens])
    return ()


class TestNgramProposer(ProposerContract):
    def make_proposer(self) -> Proposer:
        return NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3)

    def test_copies_what_followed(self, proposer: Proposer) -> None:
        assert self.tokens(proposer, view("a", [1, 2, 3, 4, 5, 6, 2, 3])) == (4, 5, 6, 2)

    def test_longest_match_wins_over_a_later_one(self, proposer: Proposer) -> None:
        assert self.tokens(proposer, view("a", [1, 2, 9, 5, 2, 8, 1, 2]), 1) == (9,)

    def test_latest_of_equal_matches_wins(self, proposer: Proposer) -> None:
        assert self.tokens(proposer, view("a", [1, 2, 9, 1, 2, 8, 1, 2]), 1) == (8,)

    def test_repetition_goes_on(self, proposer: Proposer) -> None:
        assert self.tokens(proposer, view("a", [7, 1, 2, 3, 1, 2, 3]), 7) == (1, 2, 3, 1, 2, 3, 1)

    def test_nothing_to_copy(self, proposer: Proposer) -> None:
        assert self.tokens(proposer, view("a", [1, 2, 3, 4])) == ()

    @pytest.mark.parametrize("sizes", [(1, 1), (2, 4), (3, 3)])
    def test_agrees_with_search(self, sizes: tuple[int, int]) -> None:
        generator = random.Random(sizes[1])
        proposer = NgramProposer(prompt_lookup_min=sizes[0], prompt_lookup_max=sizes[1])
        for name in range(20):
            tokens: list[int] = []
            while len(tokens) < 60:
                tokens += generator.choices(range(4), k=generator.randint(1, 6))
                budget = generator.randint(1, 8)
                assert self.tokens(proposer, view(str(name), tokens), budget) == search(tokens, sizes, budget)


def test_a_long_prompt_is_indexed_over_several_calls_and_lookups_go_on_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram, "_MOST_READ", 16)
    monkeypatch.setattr(ngram, "_ALWAYS_READ", 4)
    proposer = NgramProposer(prompt_lookup_min=2, prompt_lookup_max=3)
    prompt = [*range(100, 160), 1, 2, 3, *range(200, 220), 1, 2]
    texts = [view("long", prompt), view("short", [5, 6, 7, 5, 6])]
    found = []
    for _ in range(6):
        proposals = proposer.propose(texts, {text.request_id: 1 for text in texts})
        found.append({one: proposal.token_ids for one, proposal in proposals.items()})
    assert found[0] == {"short": (7,)}, "the long one's beginning is all that was read of it"
    assert found[-1] == {"long": (3,), "short": (7,)}


def test_an_index_has_no_more_than_so_many_tokens_and_the_latest_half_at_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ngram, "_MOST_INDEXED", 64)
    index = ngram._NgramIndex(range(2, 3))
    generator = random.Random(0)
    text: list[int] = []
    while len(text) < 600:
        text += generator.choices(range(50), k=generator.randint(1, 90))
        index.read(text, 4096)
        assert len(index._young) + len(index._old) <= 64
        latest = text[-32:]
        for end in range(2, 31):
            ngram_there = latest[end - 2 : end]
            behind = {latest[at] for at in range(2, 32) if latest[at - 2 : at] == ngram_there}
            assert set(index.look_up([*text, *ngram_there], 1)) <= set(text[-64:])
            assert behind, "each is followed by something"
            assert index.look_up([*text, *ngram_there], 1), "the latest are there"


@pytest.mark.parametrize("sizes", [(0, 2), (3, 2)])
def test_sizes_are_checked(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="1 <= min <= max"):
        NgramProposer(prompt_lookup_min=sizes[0], prompt_lookup_max=sizes[1])
