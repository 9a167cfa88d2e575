"""EAGLE, EAGLE-3 and MTP as proposers, over made-up hidden states.

What they draft is compared with the same modules run over whole rows, from the beginning, without a cache.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.core.sampling_params import SamplingParams
from specdec.proposers.base import Proposer
from specdec.proposers.draft_sampling import DraftSampling
from specdec.verification.registry import capabilities_of
from tests.specdec.proposers.best_tokens import best_of
from tests.specdec.proposers.contract import ProposerContract, view
from tests.specdec.proposers.feature_proposers import (
    DYNAMIC,
    KNOWN,
    STATIC,
    logits_behind,
    make,
    make_drafter,
)
from tests.specdec.proposers.made_up_states import VOCAB, MadeUpSource, check_displaced
from tests.specdec.proposers.proposer_setup import ProposerSetup

KINDS = [
    "eagle3",
    "mtp of three",
    *(pytest.param(one, marks=pytest.mark.full) for one in ("eagle", "eagle3.1", "mtp")),
]
SAMPLED, GREEDY = SamplingParams(), SamplingParams(temperature=0.0)


@pytest.mark.full
class TestEagle(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("eagle")


class TestEagle3(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("eagle3")


@pytest.mark.full
class TestMtp(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("mtp")


class TestMtpModules(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("mtp of three")


@pytest.mark.full
class TestTreesOfMtpModules(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("mtp of three", ProposerSetup(shape=DYNAMIC))


@pytest.mark.full
class TestStaticTrees(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("eagle3.1", ProposerSetup(shape=STATIC))


@pytest.mark.full
class TestDynamicTrees(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("eagle", ProposerSetup(shape=DYNAMIC))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_a_chain_is_what_the_token_function_chooses_on_the_module(kind: str, params: SamplingParams) -> None:
    """Also when the prefix has grown, by what was drafted or by something else, and in pieces."""
    proposer, drafter = make(kind, ProposerSetup(max_read_tokens=4)), make_drafter(kind)
    tokens = [3, 9, 4, 11]
    for kept in (0, 4, 2, 1, 0, 3):
        one = view("a", tokens, params)
        budgets = {one.request_id: 4}
        while one.request_id not in (proposals := proposer.propose([one], budgets)):
            pass
        proposal = proposals[one.request_id]
        expected: list[int] = []
        for depth in range(4):
            logits = logits_behind(drafter, tokens, expected)
            expected += best_of(logits, params, one.seed, len(tokens) + depth, 1)
        assert proposal.token_ids == tuple(expected)
        assert proposal.method == kind
        tokens = [*tokens, *expected[:kept], (expected[kept] + 5) % VOCAB if kept < 4 else 7]
        proposer.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_every_node_of_a_tree_is_among_the_best_behind_its_parent(kind: str, params: SamplingParams) -> None:
    proposer, drafter = make(kind, ProposerSetup(shape=STATIC)), make_drafter(kind)
    tokens = [3, 9, 4, 11]
    for step in range(4):
        one = view("a", tokens, params)
        proposal = proposer.propose([one], {one.request_id: 15})[one.request_id]
        assert proposal.parents is not None
        paths: dict[int, list[int]] = {-1: []}
        children: dict[int, list[int]] = {}
        for node, (token, parent) in enumerate(zip(proposal.token_ids, proposal.parents, strict=True)):
            paths[node] = [*paths[parent], token]
            children.setdefault(parent, []).append(token)
        assert sorted(map(len, children.values())) == [1, 1, 1, 1, 1, 1, 2, 2, 2, 3]
        for parent, its in children.items():
            logits = logits_behind(drafter, tokens, paths[parent])
            position = len(tokens) + len(paths[parent])
            assert its == best_of(logits, params, one.seed, position, len(its))
        tokens = [*tokens, *paths[14][:step], 7 + step]


def test_a_part_of_the_vocabulary_is_drafted_from() -> None:
    one = view("a", [3, 9, 4, 11], SamplingParams(temperature=5.0))
    proposal = make("eagle3").propose([one], {one.request_id: 30})[one.request_id]
    assert len(set(proposal.token_ids)) > 5
    assert set(proposal.token_ids) <= set(KNOWN.tolist())


def test_q_rows_are_those_that_tokens_were_drawn_from() -> None:
    setup = ProposerSetup(sampling=DraftSampling.under(capabilities_of("rejection")))
    one = view("a", [3, 9, 4, 11], SAMPLED)
    proposal = make("eagle3", setup).propose([one], {one.request_id: 3})[one.request_id]
    assert proposal.noise_stream == "draft"
    assert proposal.q_rows is not None
    assert len(proposal.q_rows) == 3
    logits = logits_behind(make_drafter("eagle3"), one.token_ids, proposal.token_ids[:2])
    row = proposal.q_rows[2]
    expected = logits.softmax(-1)
    found = torch.zeros(VOCAB)
    token_ids = np.frombuffer(row.token_ids, np.uint32).astype(np.int64)
    found[torch.from_numpy(token_ids)] = torch.from_numpy(np.frombuffer(row.probabilities, np.float32).copy())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_what_a_request_does_to_logits_is_done_to_them() -> None:
    shaped = SamplingParams(temperature=0.0, repetition_penalty=50.0)
    one = view("a", [3, 9, 4, 11], shaped)
    drafted = make("eagle").propose([one], {one.request_id: 6})[one.request_id].token_ids
    assert len({*drafted, *one.token_ids}) == 10, "nothing is said twice"


def test_who_has_no_hidden_states_has_no_proposal() -> None:
    views = [view("a", [3, 9, 4]), view("b", [3, 9, 4]), view("c", [3])]
    proposer = make("eagle", ProposerSetup(source=MadeUpSource(["a"])))
    assert list(proposer.propose(views, {one.request_id: 2 for one in views})) == ["b"]


def test_a_full_cache_costs_proposals_not_answers() -> None:
    """Whoever was not asked for for longest gives way, and is read again when its turn comes."""
    proposer = make("eagle", ProposerSetup(num_blocks=8))
    views = [view(name, [3, 9, 4, 11, 5, 6, 7, 8, int(name)]) for name in "123"]
    for _ in range(3):
        for one in views:
            expected = make("eagle").propose([one], {one.request_id: 3})
            assert proposer.propose([one], {one.request_id: 3}) == expected
            proposer.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_missed_by_who_was_displaced_in_its_own_call(kind: str) -> None:
    check_displaced(lambda source: make(kind, ProposerSetup(source=source, num_blocks=13)))
