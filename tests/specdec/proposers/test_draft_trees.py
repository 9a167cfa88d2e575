"""A draft model that drafts trees: which children, what is read again, and what rules get to know."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from scipy import stats

from specdec.core.ids import RequestId
from specdec.core.plan import SlotMove
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel, slot_value
from specdec.proposers.base import Proposer
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.draft_trees import TreeDraftProposer
from specdec.sampling.noise import MASK_64
from specdec.sampling.sampler import Sampler
from specdec.tree.dynamic import DynamicTree
from specdec.tree.growth import TreeShape
from specdec.tree.static import StaticTree
from specdec.tree.topology import topology_of
from specdec.verification.base import Draft, TargetRows
from specdec.verification.chance import CounterChance
from specdec.verification.draft_rows import unpack_rows
from specdec.verification.multi_round import MultiRound
from specdec.verification.registry import capabilities_of
from tests.specdec.proposers.contract import GREEDY, FrozenView, ProposerContract, view

VOCAB_SIZE = 24
MODEL = ToyModel(VOCAB_SIZE, seed=3)
STATIC = StaticTree.of_widths([3, 2, 2], (0.5, 0.2, 0.1))
DYNAMIC = DynamicTree(top_k=3, depth=4)
SAMPLED = SamplingParams(temperature=0.9)


class Checked(TreeDraftProposer):
    """Checks its books after every call."""

    def propose(self, *args, **options):  # type: ignore[no-untyped-def]
        proposals = super().propose(*args, **options)
        self.check_integrity()
        return proposals


def make(shape: TreeShape, runner: ToyRunner | None = None, *, rule: str = "sample_and_match") -> Checked:
    sampling = DraftSampling.under(capabilities_of(rule))
    choice = DraftChoice(sampler=Sampler(), vocab_size=VOCAB_SIZE, sampling=sampling)
    return Checked(runner or ToyRunner(MODEL), choice, shape)


def draft(proposer: Proposer, one: FrozenView, budget: int = 12) -> Proposal:
    return proposer.propose([one], {one.request_id: budget})[one.request_id]


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    topology = topology_of(proposal.num_tokens, proposal.parents)
    return [
        tuple(proposal.token_ids[at] for at in topology.path(node)) for node in range(proposal.num_tokens)
    ]


class TestStatic(ProposerContract):
    vocab_size = VOCAB_SIZE
    always_proposes = True

    def make_proposer(self) -> Proposer:
        return make(STATIC)


class TestDynamic(ProposerContract):
    vocab_size = VOCAB_SIZE
    always_proposes = True

    def make_proposer(self) -> Proposer:
        return make(DYNAMIC)


class TestWithTinyBlocksAndPool(ProposerContract):
    """Blocks of one token; the pool holds the suite's five sequences, barely."""

    vocab_size = VOCAB_SIZE

    def make_proposer(self) -> Proposer:
        return make(DYNAMIC, ToyRunner(MODEL, block_size=1, num_blocks=800))


@pytest.mark.parametrize("shape", [STATIC, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_tree_of_the_target_itself_holds_what_the_target_says(
    shape: TreeShape, params: SamplingParams
) -> None:
    """With its noise: the likeliest child of the likeliest child, and so on, is its next token."""
    for seed in range(8):
        prompt = (1, 2, 3, 4, seed)
        expected = MODEL.continuation(prompt, params, seed, 3)
        paths = paths_of(draft(make(shape), view("a", prompt, params, seed)))
        assert tuple(expected[:1]) == paths[0]
        assert tuple(expected) in paths


def test_children_are_distinct_and_in_the_order_of_their_scores() -> None:
    proposal = draft(make(STATIC), view("a", [1, 2, 3], SAMPLED))
    paths = paths_of(proposal)
    assert len(set(paths)) == len(paths) == 12
    assert proposal.parents is not None
    assert proposal.parents[: len(STATIC.parents)] == STATIC.parents[:12]


def hits(params: SamplingParams, *, is_noise_known: bool) -> int:
    """How often a similar model's four first children hold what the target says."""
    similar = ToyModel(VOCAB_SIZE, seed=3, perturbation=1.0)
    shape = StaticTree.of_widths([4], (0.5,))
    found = 0
    for seed in range(150):
        prompt = (seed % 20, 3, seed // 20)
        proposer = make(shape, ToyRunner(similar), rule="sample_and_match" if is_noise_known else "typical")
        proposal = draft(proposer, view("a", prompt, params, seed), 4)
        (said,) = MODEL.continuation(prompt, params, seed, 1)
        found += said in proposal.token_ids
    return found


def test_children_by_the_targets_noise_hold_its_choice_more_often() -> None:
    """Against the likeliest tokens, at a high temperature."""
    hot = SamplingParams(temperature=3.0)
    assert hits(hot, is_noise_known=True) > 1.4 * hits(hot, is_noise_known=False)


@pytest.mark.parametrize("shape", [STATIC, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("seed", range(2))
def test_what_was_read_of_the_path_that_stands_is_not_read_again(shape: TreeShape, seed: int) -> None:
    """Any path may stand: its K/V are moved, what follows is drafted as by a fresh proposer."""
    rng = random.Random(seed)
    runner = ToyRunner(MODEL)
    proposer = make(shape, runner)
    tokens = rng.choices(range(VOCAB_SIZE), k=9)
    num_kept = 0
    for _ in range(6):
        one = view("a", tokens, SAMPLED)
        num_before = runner.num_tokens_read
        proposal = draft(proposer, one)
        fresh_runner = ToyRunner(MODEL)
        fresh = draft(make(shape, fresh_runner), one)
        assert proposal == fresh
        num_kept += fresh_runner.num_tokens_read - (runner.num_tokens_read - num_before)
        kept = paths_of(proposal)[rng.randrange(proposal.num_tokens)]
        tokens = [*tokens, *kept, rng.randrange(VOCAB_SIZE)]
    assert num_kept > 6 * 8


@pytest.mark.parametrize("shape", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_only_leaves_and_what_the_target_added_are_read(shape: TreeShape) -> None:
    runner = ToyRunner(MODEL)
    proposer = make(shape, runner)
    tokens = [1, 2, 3, 4, 5]
    for _ in range(5):
        proposal = draft(proposer, view("a", tokens))
        longest = max(paths_of(proposal), key=len)
        # Every node but the last of this path has children, so it was read; only the last is left.
        tokens = [*tokens, *longest, 7]
        before = runner.num_tokens_read
        proposer.propose([view("a", tokens)], {RequestId("a"): 1})
        assert runner.num_tokens_read - before == 2


def test_control_moves_left_out_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignore(runner: ToyRunner, moves: Sequence[SlotMove]) -> None:
        assert moves

    monkeypatch.setattr(ToyRunner, "move_slots", ignore)
    with pytest.raises(AssertionError):
        test_what_was_read_of_the_path_that_stands_is_not_read_again(STATIC, 0)


def test_rules_that_ask_get_what_each_child_was_drawn_from() -> None:
    """Without replacement: q without the siblings before it; each token was possible where it was drawn."""
    proposer = make(STATIC, rule="multi_round")
    assert proposer.capabilities.sampled
    assert proposer.capabilities.gives_q_rows
    proposal = draft(proposer, view("a", [1, 2, 3], SAMPLED))
    assert proposal.noise_stream == "draft"
    assert proposal.q_rows is not None
    topology = topology_of(proposal.num_tokens, proposal.parents)
    for siblings in topology.children:
        taken: list[int] = []
        for node in siblings:
            row = proposal.q_rows[node]
            ids = np.frombuffer(row.token_ids, np.uint32).tolist()
            q = np.frombuffer(row.probabilities, np.float32)
            assert proposal.token_ids[node] in ids
            assert not set(taken) & set(ids)
            assert q.sum() == pytest.approx(1.0, abs=1e-5)
            taken.append(proposal.token_ids[node])


def test_without_temperature_nothing_is_drawn() -> None:
    proposal = draft(make(STATIC, rule="multi_round"), view("a", [1, 2, 3]))
    assert proposal.noise_stream is None
    assert proposal.q_rows is None


@pytest.mark.parametrize("rule", ["multi_round", "typical"])
def test_trees_by_confidence_are_not_drawn_for_rules_of_their_own_noise(rule: str) -> None:
    """Which draws are shown would depend on what was drawn: the likeliest tokens are shown instead."""
    proposer = make(DYNAMIC, rule=rule)
    assert not proposer.capabilities.sampled
    proposal = draft(proposer, view("a", [1, 2, 3], SAMPLED, seed=1))
    assert proposal.noise_stream is None
    assert proposal.q_rows is None
    assert proposal.token_ids == draft(make(DYNAMIC, rule=rule), view("a", [1, 2, 3], SAMPLED, 2)).token_ids


TINY = ToyModel(4, seed=2, sharpness=1.0)
TINY_DRAFT = ToyModel(4, seed=3, sharpness=1.0)


def p_value(shape: TreeShape, *, selects: bool = False, num_streams: int = 3_000) -> float:
    """Chi-square of two tokens by multi_round on drafted trees, one round each, against p.

    With `selects`, only the draw that the drafter itself finds likeliest is shown.
    """
    sampling = DraftSampling.under(capabilities_of("multi_round"))
    proposer = TreeDraftProposer(
        ToyRunner(TINY_DRAFT), DraftChoice(sampler=Sampler(), vocab_size=4, sampling=sampling), shape
    )
    rng = np.random.default_rng(0)
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, num_streams, 100):
        views = [view(f"r{seed}", PROMPT, SAMPLED, seed) for seed in range(first, first + 100)]
        made = proposer.propose(views, {one.request_id: shape.max_nodes for one in views})
        for one in views:
            proposal = made[one.request_id]
            if selects:
                proposal = only_the_likeliest(proposal)
            tokens = list(judged(proposal, one.seed))[:2]
            while len(tokens) < 2:
                tokens.append(int(rng.choice(4, p=p_behind(tokens))))
            counts[tuple(tokens)] += 1
        proposer.release([one.request_id for one in views])
    expected = {(a, b): p_behind([])[a] * p_behind([a])[b] for a in range(4) for b in range(4)}
    return float(
        stats.chisquare(
            [counts[tokens] for tokens in expected], [p * num_streams for p in expected.values()]
        ).pvalue
    )


PROMPT = (1, 2)


def p_behind(tokens: Sequence[int]) -> NDArray[np.float64]:
    sequence, total = [*PROMPT, *tokens], 0
    for position, token_id in enumerate(sequence):
        total = (total + slot_value(total, position, token_id)) & MASK_64
    weights = np.exp(TINY.logits(sequence[-1], total) / SAMPLED.temperature)
    return np.asarray(weights / weights.sum())


def judged(proposal: Proposal, seed: int) -> tuple[int, ...]:
    paths = [(), *paths_of(proposal)]
    q_rows = None
    if proposal.q_rows is not None:
        q_rows = unpack_rows(proposal.q_rows, 4, torch.device("cpu"))
    draft_of_rule = Draft(
        token_ids=proposal.token_ids,
        first_position=proposal.committed_len,
        parents=proposal.parents,
        noise_stream=proposal.noise_stream,
        q_rows=q_rows,
    )
    p_rows = torch.from_numpy(np.stack([p_behind(path) for path in paths]))
    return MultiRound().verify(draft_of_rule, TargetRows(p_rows=p_rows), CounterChance(seed)).token_ids


def only_the_likeliest(proposal: Proposal) -> Proposal:
    assert proposal.q_rows is not None
    first = proposal.q_rows[0]
    ids = np.frombuffer(first.token_ids, np.uint32).tolist()
    q = dict(zip(ids, np.frombuffer(first.probabilities, np.float32).tolist(), strict=True))
    best = max(proposal.token_ids, key=q.__getitem__)
    return replace(proposal, token_ids=(best,), parents=None, q_rows=(first,))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(StaticTree.of_widths([3, 2], (0.5, 0.2)), id="static", marks=pytest.mark.full),
        pytest.param(DynamicTree(top_k=2, depth=2), id="dynamic"),
    ],
)
def test_what_multi_round_makes_of_trees_is_distributed_as_the_target(shape: TreeShape) -> None:
    assert p_value(shape) > 1e-4


def test_control_draws_that_are_selected_show() -> None:
    """Why trees by confidence do not draw: what is shown would depend on what was drawn."""
    assert p_value(StaticTree.of_widths([2], (0.5,)), selects=True) < 1e-6


@pytest.mark.parametrize("num_blocks", [4, 5, 6, 8])
def test_trees_get_smaller_where_there_is_no_room(num_blocks: int) -> None:
    """The longest prefix and its draft fit into the pool; the tree is cut to what can be read."""
    runner = ToyRunner(MODEL, num_blocks=num_blocks, block_size=4, max_model_len=4 * (num_blocks - 1))
    proposer = make(DYNAMIC, runner)
    for length in range(1, runner.max_model_len + 2):
        one = view("a", [1 + n % 5 for n in range(length)])
        proposals = proposer.propose([one], {one.request_id: 12})
        if length < runner.max_model_len:
            assert 1 <= proposals[one.request_id].num_tokens <= runner.max_model_len - length
        else:
            assert proposals == {}


def test_penalties_count_the_tokens_of_each_path() -> None:
    """As the target's do: with them, too, its choice is the first child all the way."""
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, max_tokens=8)
    shape = StaticTree.of_paths([[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0]])
    proposal = draft(make(shape), view("a", [1, 2, 3, 4], params), 6)
    behind_second = paths_of(proposal)[5]
    alone = make(StaticTree.of_paths([[0], [0, 0]]))
    # Behind the second child: what is drafted when that child is committed as output.
    committed = view("b", [1, 2, 3, 4, behind_second[0]], params)
    assert paths_of(draft(alone, committed, 2))[1] == behind_second[1:]
