"""A proposer that stands in: for whom, how it says so, and that it is the primary to everybody else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.core.ids import RequestId
from specdec.proposers.base import AheadWish, AsksAhead, AsksOthers, Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.fallback import FallbackProposer
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.none import NoProposer
from specdec.proposers.registry import with_fallback
from tests.specdec.proposers.contract import ProposerContract, view
from tests.specdec.proposers.fickle_proposer import Fickle


def ngram() -> NgramProposer:
    return NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3)


class TestFallbackContract(ProposerContract):
    def make_proposer(self) -> Proposer:
        return FallbackProposer(Fickle(), ngram())


def test_it_stands_in_for_those_that_get_nothing() -> None:
    proposer = FallbackProposer(Fickle(), ngram())
    even, odd, new = view("even", [1, 2, 1, 2]), view("odd", [2, 1, 5, 2, 1]), view("new", [7, 9])
    proposals = proposer.propose([even, odd, new], {one.request_id: 3 for one in (even, odd, new)})
    assert proposals.keys() == {"even", "odd"}
    assert (proposals[even.request_id].method, proposals[even.request_id].is_fallback) == ("fickle", False)
    stood_in = proposals[odd.request_id]
    assert (stood_in.method, stood_in.is_fallback, stood_in.token_ids) == ("ngram", True, (5, 2, 1))
    assert (stood_in.noise_stream, stood_in.q_rows) == (None, None)


def test_who_wants_nothing_gets_nothing() -> None:
    odd = view("odd", [2, 1, 5, 2, 1])
    for budgets in ({}, {odd.request_id: 0}):
        assert FallbackProposer(Fickle(), ngram()).propose([odd], budgets) == {}


def test_to_its_caller_it_is_the_primary() -> None:
    primary = Fickle()
    proposer = FallbackProposer(primary, ngram())
    assert proposer.capabilities is primary.capabilities
    assert proposer.counters == {"fickle_counts": 1.0}
    assert isinstance(proposer, AsksAhead)
    assert isinstance(proposer, AsksOthers)
    wish = AheadWish(
        view=view("odd", [1]), pending=(5, 2), num_draft_tokens=2, fan_out=(1, 1, 2), is_foreign=True
    )
    proposer.look_ahead([wish])
    assert primary.wishes == [wish]
    assert len(proposer.take_ahead_outcomes()) == 1
    assert (proposer.ready_s, proposer.take_drafting_s(), proposer.take_asking_s()) == (0.5, 0.25, 0.125)
    proposer.release(iter([RequestId("odd")]))
    assert primary.released == ["odd"]
    proposer.close()
    assert primary.is_closed


def test_a_primary_in_this_process_looks_nowhere_ahead() -> None:
    proposer = FallbackProposer(NoProposer(), ngram())
    assert (proposer.take_ahead_outcomes(), proposer.ready_s, proposer.take_drafting_s()) == ((), None, 0.0)
    assert proposer.take_asking_s() == 0.0
    proposer.look_ahead([])


@pytest.mark.parametrize("field", ["sampled", "remote"])
def test_only_what_is_exact_for_every_rule_may_stand_in(field: str) -> None:
    fallback = ngram()
    fallback.capabilities = replace(fallback.capabilities, **{field: True})
    with pytest.raises(ValueError, match="cannot stand in"):
        FallbackProposer(Fickle(), fallback)


def test_it_is_asked_for_by_name() -> None:
    primary = Fickle()
    asked = SpeculativeConfig(method="draft_model", model="m", fallback="ngram")
    assert isinstance(with_fallback(primary, asked), FallbackProposer)
    assert with_fallback(primary, SpeculativeConfig(method="draft_model", model="m")) is primary


def test_where_it_makes_no_sense_it_is_refused() -> None:
    with pytest.raises(ValueError, match="leave out fallback"):
        SpeculativeConfig(method="ngram", fallback="ngram")
    with pytest.raises(ValueError, match="leave out fallback"):
        SpeculativeConfig.model_validate(
            {
                "method": "draft_model",
                "model": "m",
                "fallback": "ngram",
                "synthetic_acceptance": {"acceptance": [0.8]},
            }
        )
