"""What method lookahead proposes, and when the window moves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.proposers.base import HearsBeside, Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.lookahead.config import LookaheadConfig
from specdec.proposers.lookahead.proposer import LookaheadProposer
from specdec.proposers.registry import create_proposer
from specdec.proposers.target_facts import TargetFacts
from specdec.tree.topology import path_of_tokens, topology_of
from tests.specdec.proposers.contract import FrozenView, ProposerContract, view
from tests.specdec.proposers.lookahead.answers import answers_of, say_by_last

SMALL = LookaheadConfig(window_size=3, ngram_size=3, verification_set_size=4)
WINDOW_ALONE = SMALL.model_copy(update={"reads_text": False})


class TestLookaheadProposer(ProposerContract):
    def make_proposer(self) -> Proposer:
        return LookaheadProposer(SMALL)

    def test_proposes_what_followed_in_the_text(self, proposer: Proposer) -> None:
        assert self.tokens(proposer, view("a", [1, 2, 3, 1, 5, 6, 9, 1])) == (5, 6, 2, 3)

    def test_reads_no_text_where_told_so(self) -> None:
        proposer = LookaheadProposer(WINDOW_ALONE)
        assert self.tokens(proposer, view("a", [1, 2, 3, 1, 2, 3, 1])) == ()


def propose(proposer: Proposer, one: FrozenView, budget: int = 8) -> Proposal:
    return proposer.propose([one], {one.request_id: budget})[one.request_id]


def window(proposal: Proposal) -> Sequence[int]:
    assert proposal.beside is not None
    return proposal.beside.token_ids


def test_the_window_alone_learns_what_the_target_says() -> None:
    """Of a target whose next token depends on the last, everything is right soon."""
    proposer = LookaheadProposer(WINDOW_ALONE)
    text = [40, 3]
    num_right = 0
    for number in range(130):
        proposal = propose(proposer, view("a", text))
        assert proposal.beside is not None
        answers = answers_of(proposal.beside, text, say_by_last)
        proposer.hear_beside(proposal, answers)
        text.append(say_by_last(text))
        right = [text[-1], say_by_last(text)]
        if proposal.token_ids:
            assert number >= 2
            topology = topology_of(proposal.num_tokens, proposal.parents)
            num_right += path_of_tokens(topology, proposal.token_ids, right) is not None
    assert num_right > 60


def test_every_sequence_with_a_budget_has_a_window() -> None:
    proposer = LookaheadProposer(SMALL)
    assert proposer.capabilities.num_rows_beside == 5
    proposal = propose(proposer, view("a", [1, 2]))
    assert proposal.token_ids == ()
    assert proposal.parents is None
    assert len(window(proposal)) == 5
    assert set(window(proposal)) <= {1, 2}
    assert isinstance(proposer, HearsBeside)


def test_what_is_heard_moves_the_window_of_that_prefix_alone() -> None:
    proposer = LookaheadProposer(SMALL)
    first = propose(proposer, view("a", [1, 2, 3]))
    second = propose(proposer, view("a", [1, 2, 3, 4]))
    assert window(second) == window(first)  # nothing was heard
    proposer.hear_beside(first, [7, 8, 9])  # too late
    third = propose(proposer, view("a", [1, 2, 3, 4, 5]))
    assert window(third) == window(first)
    proposer.hear_beside(third, [7, 8])  # not what was asked for
    proposer.hear_beside(third, [7, 8, 9])
    proposer.hear_beside(third, [10, 11, 12])  # once more
    fourth = propose(proposer, view("a", [1, 2, 3, 4, 5, 6, 7]))
    assert window(fourth) == (*window(third)[-2:], 7, 8, 9)
    propose(proposer, view("a", [1, 2, 3]))
    proposer.hear_beside(fourth, [10, 11, 12])  # it is another sequence now
    assert 12 not in window(propose(proposer, view("a", [1, 2, 3, 4])))
    proposer.release([RequestId("a")])
    proposer.hear_beside(fourth, [10, 11, 12])


def test_long_texts_are_read_from_where_they_count() -> None:
    config = SMALL.model_copy(update={"max_pool_ngrams": 16})
    proposer = LookaheadProposer(config)
    text = [*range(100), 7]
    assert propose(proposer, view("a", text)).token_ids == ()  # what followed 7 is long gone
    assert propose(proposer, view("a", [*text, 95])).token_ids == (96, 97)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "ngram", "lookahead": {"window_size": 3}}, "lookahead is about method lookahead"),
        ({"num_speculative_tokens": 16}, r"verification_set_size \* \(ngram_size - 1\) = 15"),
        ({"rejection_sample_method": "block"}, "takes chains: write sample_and_match or multi_round"),
        ({"lookahead": {"max_window_size": 3}}, "there is no key max_window_size here; write window_size"),
        ({"lookahead": {"guess_set_size": 3}}, "write verification_set_size"),
        ({"lookahead": {"ngram_size": 2}}, "greater than or equal to 3"),
        ({"model": "somewhere"}, "takes no `model`"),
        ({"tree": {"shape": "dynamic"}}, "leave out tree"),
    ],
)
def test_configuration_names_what_is_wrong(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SpeculativeConfig.model_validate({"method": "lookahead", **keys})


def test_the_registry_knows_it() -> None:
    config = SpeculativeConfig(method="lookahead", num_speculative_tokens=15)
    proposer = create_proposer(config, TargetFacts(vocab_size=8, dtype="float32", max_num_seqs=1))
    assert proposer.capabilities.num_rows_beside == config.num_rows_beside == 14
    assert SpeculativeConfig(method="ngram").num_rows_beside == 0
