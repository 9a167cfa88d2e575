"""Suffix decoding: what is found, how much is proposed, what is remembered and for whom."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from pydantic import ValidationError

from specdec.core.ids import RequestId
from specdec.proposers.base import Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.fallback import FallbackProposer
from specdec.proposers.lookup_config import SuffixConfig
from specdec.proposers.none import NoProposer
from specdec.proposers.registry import with_fallback
from specdec.proposers.suffix import SuffixProposer
from specdec.tree.topology import topology_of
from tests.specdec.proposers.contract import FrozenView, ProposerContract, view

OWN = SuffixConfig(max_shared_tokens=0)
EAGER = SuffixConfig(max_shared_tokens=0, max_spec_factor=64.0, min_token_probability=0.0)


class TestSuffixContract(ProposerContract):
    def make_proposer(self) -> Proposer:
        return SuffixProposer(EAGER)


class TestSuffixTreeContract(ProposerContract):
    def make_proposer(self) -> Proposer:
        return SuffixProposer(EAGER.model_copy(update={"shape": "tree"}))


class TestSharedSuffixContract(ProposerContract):
    remembers = True

    def make_proposer(self) -> Proposer:
        return SuffixProposer(SuffixConfig())


def drafted(proposer: Proposer, one: FrozenView, budget: int = 8) -> tuple[int, ...]:
    proposal = proposer.propose([one], {one.request_id: budget}).get(one.request_id)
    return () if proposal is None else proposal.token_ids


def generate(
    proposer: SuffixProposer, name: str, prompt: Sequence[int], answer: Sequence[int], salt: str | None = None
) -> None:
    """Run a request to its end, token by token, and have what it said read."""
    for end in range(len(answer) + 1):
        one = replace(view(name, [*prompt, *answer[:end]]), num_prompt_tokens=len(prompt), cache_salt=salt)
        proposer.propose([one], {one.request_id: 1})
    proposer.release([RequestId(name)])
    proposer.propose([], {})


def asked(tokens: Sequence[int], salt: str | None = None, name: str = "new") -> FrozenView:
    return replace(view(name, tokens), num_prompt_tokens=len(tokens), cache_salt=salt)


def search(text: Sequence[int], min_match: int) -> tuple[int, Counter[int]]:
    """The longest suffix that occurred before with something behind it, and what was behind it."""
    for size in range(len(text) - 1, min_match - 1, -1):
        behind = Counter(
            text[at + size] for at in range(len(text) - size) if text[at : at + size] == text[-size:]
        )
        if behind:
            return size, behind
    return 0, Counter()


@pytest.mark.parametrize("seed", range(15))
def test_the_most_frequent_continuation_of_the_longest_match(seed: int) -> None:
    generator = random.Random(seed)
    proposer = SuffixProposer(EAGER)
    text: list[int] = []
    for _ in range(40):
        text += generator.choices(range(3), k=generator.randint(1, 3))
        tokens = drafted(proposer, view("a", text), 1)
        _, behind = search(text, 1)
        assert bool(tokens) == bool(behind)
        if tokens:
            assert behind[tokens[0]] == max(behind.values())


def test_repetition_goes_on() -> None:
    assert drafted(SuffixProposer(EAGER), view("a", [7, 1, 2, 3, 1, 2, 3]), 7) == (1, 2, 3, 1, 2, 3, 1)


def test_frequent_wins_over_rare() -> None:
    text = [1, 2, 5, 1, 2, 5, 1, 2, 9, 8, 1, 2]
    assert drafted(SuffixProposer(EAGER), view("a", text), 1) == (5,)


@pytest.mark.parametrize(
    ("factor", "match", "most"), [(1.0, 1, 1), (1.0, 3, 3), (2.0, 3, 6), (0.5, 3, 1), (9.0, 3, 8)]
)
def test_a_longer_match_brings_more(factor: float, match: int, most: int) -> None:
    phrase = list(range(10, 30))
    text = [*phrase, 99, *phrase[:match]]
    proposer = SuffixProposer(OWN.model_copy(update={"max_spec_factor": factor}))
    assert drafted(proposer, view("a", text), 8) == tuple(phrase[match : match + most])


def test_short_matches_may_be_left_alone() -> None:
    proposer = SuffixProposer(OWN.model_copy(update={"min_match_tokens": 3}))
    phrase = list(range(10, 30))
    assert drafted(proposer, view("a", [*phrase, 99, *phrase[:2]])) == ()
    assert drafted(proposer, view("b", [*phrase, 99, *phrase[:3]])) == tuple(phrase[3:6])


def test_unlikely_tokens_are_left_out() -> None:
    text = [token for other in range(20, 26) for token in (1, 2, 3, other)] + [1]
    likely = OWN.model_copy(update={"min_token_probability": 0.5, "max_spec_factor": 8.0})
    assert drafted(SuffixProposer(likely), view("a", text)) == (2, 3)


def test_a_tree_has_the_alternatives() -> None:
    text = [1, 2, 5, 6, 1, 2, 7, 8, 1, 2, 5, 6, 9, 1, 2]
    proposer = SuffixProposer(EAGER.model_copy(update={"shape": "tree"}))
    assert proposer.capabilities.shape == "tree"
    one = view("a", text)
    (proposal,) = proposer.propose([one], {one.request_id: 3}).values()
    tree = topology_of(proposal.num_tokens, proposal.parents)
    spelled = {tuple(proposal.token_ids[at] for at in tree.path(node)) for node in range(3)}
    assert spelled == {(5,), (5, 6), (7,)}


def test_a_later_request_finds_what_an_earlier_one_generated() -> None:
    proposer = SuffixProposer(SuffixConfig())
    generate(proposer, "first", [1, 2, 3], [40, 41, 42, 43, 44, 45])
    one = asked([9, 8, 40, 41, 42])
    (proposal,) = proposer.propose([one], {one.request_id: 8}).values()
    assert proposal.token_ids == (43, 44, 45)
    assert proposal.method == "suffix_shared"
    # The end of its prompt is kept with it: the same question is answered from the first token on.
    assert drafted(proposer, asked([1, 2, 3], name="same"), 3) == (40, 41, 42)


def test_the_longer_match_counts() -> None:
    proposer = SuffixProposer(SuffixConfig())
    generate(proposer, "first", [1], [40, 41, 42, 43])
    assert drafted(proposer, asked([41, 42, 50, 40, 41, 42]), 1) == (43,)
    assert drafted(proposer, asked([39, 40, 41, 42, 50, 39, 40, 41, 42], name="own"), 1) == (50,)


def test_salts_share_nothing() -> None:
    proposer = SuffixProposer(SuffixConfig())
    generate(proposer, "first", [1, 2, 3], [40, 41, 42, 43], salt="one key")
    assert drafted(proposer, asked([9, 40, 41], "another key")) == ()
    assert drafted(proposer, asked([9, 40, 41], None, "nobody's")) == ()
    assert drafted(proposer, asked([9, 40, 41], "one key", "its own")) == (42, 43)


def test_sharing_can_be_turned_off() -> None:
    proposer = SuffixProposer(OWN)
    generate(proposer, "first", [1, 2, 3], [40, 41, 42, 43])
    assert drafted(proposer, asked([9, 40, 41])) == ()
    assert proposer.num_shared_tokens == 0


def test_prompts_are_not_kept() -> None:
    proposer = SuffixProposer(SuffixConfig())
    generate(proposer, "first", list(range(100, 200)), [40, 41])
    assert drafted(proposer, asked([9, 110, 111])) == ()


def test_requests_that_are_done_are_forgotten_one_by_one() -> None:
    proposer = SuffixProposer(SuffixConfig(max_shared_tokens=200))
    for index in range(30):
        generate(proposer, f"r{index}", [1], [1000 + 20 * index + step for step in range(19)])
        assert proposer.num_shared_tokens <= 200
    assert drafted(proposer, asked([9, 1000, 1001], name="old")) == ()
    assert drafted(proposer, asked([9, 1580, 1581], name="young")) == (1582, 1583)


def test_an_own_text_that_is_long_is_looked_at_in_part() -> None:
    """Whatever it grew from: the answer is that of a proposer that sees it for the first time."""
    config = EAGER.model_copy(update={"max_text_tokens": 64})
    grown = SuffixProposer(config)
    generator = random.Random(2)
    text: list[int] = []
    for _ in range(80):
        text += generator.choices(range(4), k=generator.randint(1, 5))
        one = view("a", text)
        assert drafted(grown, one) == drafted(SuffixProposer(config), one)
    phrase = list(range(50, 60))
    for between, tokens in ((20, tuple(phrase[3:9])), (70, ())):
        text = [*range(100, 200), *phrase, *range(200, 200 + between), *phrase[:3]]
        assert drafted(SuffixProposer(config), view("b", text), 6) == tokens


def test_a_long_prompt_is_read_over_several_rounds() -> None:
    proposer = SuffixProposer(OWN)
    text = [*range(9000), 1, 2]
    found = [drafted(proposer, view("a", text), 2) for _ in range(4)]
    assert found == [(), (), (3, 4), (3, 4)]


def test_it_stands_in_for_a_draft_model() -> None:
    config = SpeculativeConfig(method="draft_model", model="m", fallback="suffix")
    proposer = with_fallback(NoProposer(), config)
    assert isinstance(proposer, FallbackProposer)
    one = view("a", [1, 2, 3, 4, 2, 3])
    (proposal,) = proposer.propose([one], {one.request_id: 4}).values()
    assert (proposal.token_ids, proposal.is_fallback) == ((4, 2), True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"suffix": {"shape": "tree"}}, "suffix is about method suffix.* method ngram, nothing is looked up"),
        (
            {"method": "suffix", "suffix": {"shape": "tree"}, "rejection_sample_method": "block"},
            "suffix.shape: tree: rejection_sample_method block takes chains: write sample_and_match",
        ),
        (
            {"method": "draft_model", "model": "m", "fallback": "suffix", "suffix": {"shape": "tree"}},
            "suffix.shape: tree needs method suffix",
        ),
        ({"method": "suffix", "suffix": {"max_text_tokens": 10}}, "greater than or equal to 64"),
        ({"method": "suffix", "suffix": {"min_token_probability": 1.5}}, "less than or equal to 1"),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": 0.1},
            "no key suffix_decoding_min_token_prob here; write suffix.min_token_probability",
        ),
        ({"method": "suffix", "kv": {"policy": "streaming"}}, "method suffix has none"),
    ],
)
def test_contradictions(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SpeculativeConfig.model_validate(keys)


def test_a_configuration_survives_being_written_and_read() -> None:
    config = SpeculativeConfig(method="suffix", suffix=SuffixConfig(shape="tree"))
    assert SpeculativeConfig.model_validate(config.model_dump()) == config
    assert SpeculativeConfig.model_validate(SpeculativeConfig().model_dump()) == SpeculativeConfig()
