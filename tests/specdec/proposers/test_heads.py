"""Heads as proposers, over made-up hidden states: a row is drawn from the hash of the prefix that it ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.proposers.base import HasRoom, Proposer, ReadsAlong
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.heads import HeadProposer
from specdec.tree.dynamic import DynamicTree
from specdec.tree.static import StaticTree
from specdec.verification.registry import capabilities_of
from tests.specdec.proposers.best_tokens import best_of
from tests.specdec.proposers.contract import FrozenView, ProposerContract, view
from tests.specdec.proposers.head_proposers import NUM_HEADS, logits_behind, make
from tests.specdec.proposers.made_up_states import VOCAB, MadeUpSource, check_displaced
from tests.specdec.proposers.proposer_setup import ProposerSetup

KINDS = [
    "medusa",
    "hydra++",
    pytest.param("hydra", marks=pytest.mark.full),
    pytest.param("parallel_heads", marks=pytest.mark.full),
]
PLAIN, SHAPED = SamplingParams(), SamplingParams(repetition_penalty=2.5, presence_penalty=1.0)
GREEDY = SamplingParams(temperature=0.0)
STATIC = StaticTree.of_widths((3, 2, 1, 1), (0.5, 0.3, 0.1))
DYNAMIC = DynamicTree(top_k=3, depth=5)


class TestMedusa(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("medusa")


class TestHydra(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("hydra")


@pytest.mark.full
class TestPrefixLayer(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("hydra++")


@pytest.mark.full
class TestParallelHeads(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("parallel_heads")


class TestStaticTrees(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("medusa", ProposerSetup(shape=STATIC))


@pytest.mark.full
class TestDynamicTrees(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("hydra++", ProposerSetup(shape=DYNAMIC))


@pytest.mark.parametrize("kind", ["medusa", "hydra++"])
def test_heads_say_what_they_have_read_and_what_room_they_have(kind: str) -> None:
    """Draft workers ask: heads with layers have K/V to read texts into."""
    proposer = make(kind)
    assert isinstance(proposer, ReadsAlong)
    assert isinstance(proposer, HasRoom)
    has_layers = kind == "hydra++"
    one = view("r", range(1, 13))
    assert (proposer.num_unread(one) > 0) == has_layers
    ask(proposer, one, 2)
    assert proposer.num_unread(one) == 0
    assert (proposer.memory_held > 0.0) == has_layers
    assert list(proposer.crowded_out) == []
    assert proposer.has_room("r", 1_000_000) == (not has_layers)


def ask(proposer: HeadProposer, one: FrozenView, budget: int) -> Proposal:
    """Until it has read all."""
    for _ in range(20):
        if one.request_id in (proposals := proposer.propose([one], {one.request_id: budget})):
            return proposals[one.request_id]
    raise AssertionError("it never proposes")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [PLAIN, GREEDY], ids=["sampled", "greedy"])
def test_a_chain_is_what_the_token_function_chooses_on_the_heads(kind: str, params: SamplingParams) -> None:
    """Also when the prefix has grown, by what was drafted or by something else, and in pieces."""
    proposer, tokens = make(kind, ProposerSetup(max_read_tokens=4)), [3, 9, 4, 11, 5, 2, 8]
    for kept in (0, 3, 2, 1, 0):
        one = view("a", tokens, params)
        proposal = ask(proposer, one, 9)
        expected: list[int] = []
        for depth in range(NUM_HEADS):
            logits = logits_behind(kind, tokens, expected)
            expected += best_of(logits, params, one.seed, len(tokens) + depth, 1)
        assert proposal.token_ids == tuple(expected), "no more than there are heads"
        assert (proposal.method, proposal.parents) == (kind, None)
        tokens = [*tokens, *expected[:kept], (expected[kept] + 5) % VOCAB if kept < NUM_HEADS else 7]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [PLAIN, GREEDY], ids=["sampled", "greedy"])
def test_every_node_of_a_tree_is_among_the_best_behind_its_parent(kind: str, params: SamplingParams) -> None:
    """Deeper nodes than there are heads are left out."""
    proposer, tokens = make(kind, ProposerSetup(shape=STATIC)), [3, 9, 4, 11]
    for step in range(3):
        one = view("a", tokens, params)
        proposal = ask(proposer, one, STATIC.max_nodes)
        assert proposal.parents is not None
        paths: dict[int, list[int]] = {-1: []}
        children: dict[int, list[int]] = {}
        for node, (token, parent) in enumerate(zip(proposal.token_ids, proposal.parents, strict=True)):
            paths[node] = [*paths[parent], token]
            children.setdefault(parent, []).append(token)
        assert sorted(map(len, children.values())) == [1, 1, 1, 1, 1, 1, 2, 2, 2, 3]
        for parent, its in children.items():
            logits = logits_behind(kind, tokens, paths[parent])
            assert its == best_of(logits, params, one.seed, len(tokens) + len(paths[parent]), len(its))
        tokens = [*tokens, *paths[14][:step], 7 + step]


def test_a_tree_grows_where_the_heads_are_sure() -> None:
    """Its first nodes are those of highest probability along their paths, of all that the heads have."""
    one = view("a", [3, 9, 4, 11], GREEDY)
    proposal = ask(make("medusa", ProposerSetup(shape=DYNAMIC)), one, 7)
    depths = [logits_behind("medusa", one.token_ids, [0] * depth).log_softmax(-1) for depth in range(2)]
    values: dict[tuple[int, ...], float] = {}
    for first in depths[0].topk(3).indices.tolist():
        values[first,] = float(depths[0][first])
        for second in depths[1].topk(3).indices.tolist():
            values[first, second] = values[first,] + float(depths[1][second])
    assert proposal.parents is not None
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (token, parent) in enumerate(zip(proposal.token_ids, proposal.parents, strict=True)):
        paths[node] = (*paths[parent], token)
    shallow = [path for path in list(paths.values())[1:] if len(path) <= 2]
    assert len(shallow) >= 5
    assert set(shallow[:5]) <= set(sorted(values, key=values.__getitem__)[-7:])


@pytest.mark.parametrize("kind", ["medusa", "hydra++"])
def test_rules_that_ask_get_what_each_child_was_drawn_from(kind: str) -> None:
    setup = ProposerSetup(sampling=DraftSampling.under(capabilities_of("multi_round")), shape=STATIC)
    one = view("a", [3, 9, 4, 11], PLAIN)
    proposal = ask(make(kind, setup), one, STATIC.max_nodes)
    assert proposal.noise_stream == "draft"
    assert proposal.q_rows is not None
    assert proposal.parents is not None
    first = [node for node, parent in enumerate(proposal.parents) if parent == -1]
    left = logits_behind(kind, one.token_ids, ()).softmax(-1)
    for node in first:
        expected = torch.zeros(VOCAB)
        row = proposal.q_rows[node]
        token_ids = torch.from_numpy(np.frombuffer(row.token_ids, np.uint32).astype(np.int64))
        expected[token_ids] = torch.from_numpy(np.frombuffer(row.probabilities, np.float32).copy())
        torch.testing.assert_close(left / left.sum(), expected, atol=1e-5, rtol=1e-4)
        left[proposal.token_ids[node]] = 0.0
    greedy = ask(make(kind, setup), view("a", [3, 9, 4, 11], GREEDY), 15)
    assert (greedy.noise_stream, greedy.q_rows) == (None, None)


def test_a_full_cache_costs_proposals_not_answers() -> None:
    """Whoever was not asked for for longest gives way, and is read again when its turn comes."""
    proposer = make("hydra++", ProposerSetup(num_blocks=7))
    views = [view(name, [3, 9, 4, 11, 5, 6, 7, 8, int(name)]) for name in "123"]
    for _ in range(3):
        for one in views:
            expected = make("hydra++").propose([one], {one.request_id: 3})
            assert expected
            assert proposer.propose([one], {one.request_id: 3}) == expected


def test_states_are_missed_by_who_was_displaced_in_its_own_call() -> None:
    check_displaced(lambda source: make("hydra++", ProposerSetup(source=source, num_blocks=13)))


def test_what_a_request_does_to_logits_is_done_to_the_heads() -> None:
    """Also after a prefix that went another way."""
    proposer = make("medusa")
    for token_ids in ([3, 9, 4, 11], [3, 9, 4, 11, 5, 5], [3, 9, 8, 11, 5, 5, 2]):
        one = view("a", token_ids, SHAPED)
        budgets = {one.request_id: 3}
        assert proposer.propose([one], budgets) == make("medusa").propose([one], budgets)


def test_q_rows_are_those_that_tokens_were_drawn_from() -> None:
    setup = ProposerSetup(sampling=DraftSampling.under(capabilities_of("rejection")))
    one = view("a", [3, 9, 4, 11], PLAIN)
    proposal = make("hydra", setup).propose([one], {one.request_id: 3})[one.request_id]
    assert proposal.noise_stream == "draft"
    assert proposal.q_rows is not None
    assert len(proposal.q_rows) == 3
    greedy = view("a", [3, 9, 4, 11], GREEDY)
    proposal = make("hydra", setup).propose([greedy], {greedy.request_id: 3})[greedy.request_id]
    assert (proposal.noise_stream, proposal.q_rows) == (None, None)


@pytest.mark.parametrize("kind", ["medusa", "hydra++"])
def test_who_has_no_hidden_states_has_no_proposal(kind: str) -> None:
    views = [view("a", [3, 9, 4]), view("b", [3, 9, 4]), view("c", [3])]
    proposer = make(kind, ProposerSetup(source=MadeUpSource(["a"])))
    assert list(proposer.propose(views, {one.request_id: 2 for one in views})) == ["b"]
