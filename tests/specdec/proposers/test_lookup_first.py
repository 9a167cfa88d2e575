"""A lookup that goes before a draft model: whom it drafts for, and what the draft model is asked for then."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from specdec.core.ids import RequestId
from specdec.proposers.base import Proposer
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.lookup_config import SuffixConfig
from specdec.proposers.lookup_first import LookupFirst
from specdec.proposers.registry import with_fallback
from specdec.proposers.suffix import SuffixProposer
from tests.specdec.proposers.contract import ProposerContract, view
from tests.specdec.proposers.fickle_proposer import Fickle


def first(min_match_tokens: int) -> SuffixProposer:
    return SuffixProposer(SuffixConfig(max_shared_tokens=0, min_match_tokens=min_match_tokens))


class TestLookupFirstContract(ProposerContract):
    def make_proposer(self) -> Proposer:
        return LookupFirst(Fickle(), first(2))


def test_a_long_match_wins_and_the_draft_model_is_not_asked() -> None:
    quoting, new = view("quoting", [1, 2, 4, 6, 8, 1, 2, 4]), view("new", [1, 3, 5, 4, 6, 4])
    proposer = LookupFirst(Fickle(), first(3))
    proposals = proposer.propose([quoting, new], {RequestId("quoting"): 5, RequestId("new"): 2})
    looked_up, drafted = proposals[quoting.request_id], proposals[new.request_id]
    assert (looked_up.token_ids, looked_up.method, looked_up.is_fallback) == ((6, 8, 1), "suffix", True)
    assert (drafted.token_ids, drafted.method, drafted.is_fallback) == ((23, 23), "fickle", False)


def test_the_draft_model_still_sees_everybody() -> None:
    asked: list[tuple[list[str], dict[RequestId, int]]] = []

    class Watched(Fickle):
        def propose(self, sequences, num_draft_tokens):  # type: ignore[no-untyped-def]
            asked.append(([one.request_id for one in sequences], dict(num_draft_tokens)))
            return super().propose(sequences, num_draft_tokens)

    quoting, new = view("quoting", [1, 2, 4, 6, 8, 1, 2, 4]), view("new", [1, 3, 5, 4])
    proposer = LookupFirst(Watched(), first(3))
    proposer.propose([quoting, new], {RequestId("quoting"): 5, RequestId("new"): 2})
    assert asked == [(["quoting", "new"], {RequestId("new"): 2})]


def test_to_its_caller_it_is_the_draft_model() -> None:
    primary = Fickle()
    proposer = LookupFirst(primary, first(2))
    assert proposer.capabilities == replace(primary.capabilities, looks_first=True)
    assert proposer.ready_s == 0.5
    proposer.release([RequestId("a")])
    assert primary.released == ["a"]
    proposer.close()
    assert primary.is_closed


def test_it_is_asked_for_by_number() -> None:
    config = SpeculativeConfig(method="draft_model", model="m", lookup_first=3, fallback="ngram")
    proposer = with_fallback(Fickle(), config)
    assert isinstance(proposer, LookupFirst)
    odd = {
        "a long match": ([2, 4, 5, 9, 2, 4, 5], "suffix"),
        "a short one": ([1, 4, 5, 9, 2, 4, 5], "ngram"),
        "none": ([1, 2, 3], None),
    }
    for name, (tokens, method) in odd.items():
        one = view(name, tokens)
        proposal = proposer.propose([one], {one.request_id: 3}).get(one.request_id)
        assert (None if proposal is None else proposal.method) == method


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lookup_first": 4}, "a target that drafts for itself; method ngram is none of them"),
        (
            {"method": "draft_model", "model": "m", "lookup_first": 4, "fallback": "suffix"},
            "would keep all texts twice: write fallback: ngram",
        ),
        ({"method": "draft_model", "model": "m", "lookup_first": 0}, "greater than or equal to 1"),
        (
            {"method": "draft_model", "model": "m", "lookup_first": 2, "suffix": {"shape": "tree"}},
            "suffix.shape: tree needs method suffix",
        ),
        (
            {
                "method": "draft_model",
                "model": "m",
                "lookup_first": 2,
                "synthetic_acceptance": {"acceptance": [0.5]},
            },
            "leave out fallback and lookup_first",
        ),
    ],
)
def test_contradictions(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SpeculativeConfig.model_validate(keys)
