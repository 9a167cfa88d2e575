"""Draft models that draft trees, in engines: the same tokens, the right distribution, and over the wire."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from specdec.core.ids import RequestId
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel
from specdec.proposers.base import Proposer
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.draft_trees import TreeDraftProposer
from specdec.sampling.sampler import Sampler
from specdec.transport.memory import Faults
from specdec.tree.dynamic import DynamicTree
from specdec.tree.growth import TreeShape
from specdec.tree.static import StaticTree
from specdec.verification.registry import capabilities_of
from tests.specdec.engine import remote_cluster, toy_engines
from tests.specdec.engine.judged_engines import engine_of
from tests.specdec.engine.remote_cluster import CAPABILITIES, Cluster, a_request
from tests.specdec.engine.stream_frequencies import TINY_DRAFT, p_value
from tests.specdec.engine.toy_engines import expected_tokens, requests_of, run, tokens_of

STATIC = StaticTree.of_widths([3, 2, 1], (0.5, 0.2, 0.1))
DYNAMIC = DynamicTree(top_k=3, depth=4)
SHAPES = {"static": STATIC, "dynamic": DYNAMIC}
SIMILAR = ToyModel(toy_engines.VOCAB_SIZE, seed=1, perturbation=0.2)


def trees_of(
    shape: TreeShape, model: ToyModel = SIMILAR, rule: str = "sample_and_match", **options: int
) -> TreeDraftProposer:
    return TreeDraftProposer(
        ToyRunner(model, **options),
        DraftChoice(
            sampler=Sampler(),
            vocab_size=model.vocab_size,
            sampling=DraftSampling.under(capabilities_of(rule)),
        ),
        shape,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_blocks", [256, 40])
def test_tokens_are_those_without_trees(shape: str, num_blocks: int) -> None:
    """Also where the drafter's own memory is short."""
    proposer = trees_of(SHAPES[shape], num_blocks=num_blocks)
    engine = toy_engines.toy_engine(proposer, num_draft_tokens=9)
    requests = requests_of(12)
    outputs = run(engine, *requests)
    for one in requests:
        assert tokens_of(outputs[one.request_id]) == expected_tokens(one)
    proposer.check_integrity()
    metrics = engine.metrics()
    assert metrics.num_accepted_tokens > 0
    assert metrics.num_moved_kv > 0
    assert metrics.proposals_dropped.total() == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_trees_bring_more_than_chains_of_their_depth(shape: str) -> None:
    """At a temperature, too: several children are tried where a chain has one."""
    lengths = []
    other = ToyModel(toy_engines.VOCAB_SIZE, seed=1, perturbation=0.0)
    chain = StaticTree.of_paths([[0], [0, 0], [0, 0, 0]])
    for one, num_nodes in ((chain, 3), (SHAPES[shape], 12)):
        engine = toy_engines.toy_engine(trees_of(one, other), num_draft_tokens=num_nodes)
        run(engine, *requests_of(8, max_tokens=60))
        lengths.append(engine.metrics().mean_acceptance_length)
    assert lengths[1] > lengths[0] + 0.1


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_what_comes_out_is_distributed_as_the_target(shape: str) -> None:
    """multi_round: draws without replacement in a static tree, likeliest tokens in a dynamic one."""
    shapes = {"static": StaticTree.of_widths([2, 2], (0.5, 0.2)), "dynamic": DynamicTree(top_k=2, depth=2)}
    proposer = trees_of(shapes[shape], TINY_DRAFT, "multi_round")
    assert p_value("multi_round", proposer, num_draft_tokens=5, num_more=6) > 1e-4


@pytest.mark.parametrize("rule", ["multi_round", "typical"])
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_requests_get_the_targets_tokens_under_every_rule(rule: str, shape: str) -> None:
    proposer = trees_of(SHAPES[shape], rule=rule)
    engine = engine_of(rule, toy_engines.MODEL, proposer, num_draft_tokens=8)
    requests = requests_of(10)
    outputs = run(engine, *requests)
    for one in requests:
        if one.params.is_greedy:
            assert tokens_of(outputs[one.request_id]) == expected_tokens(one)
    assert engine.metrics().proposals_dropped.total() == 0
    assert engine.metrics().num_accepted_tokens > 0


def make_drafter(shape: TreeShape) -> Proposer:
    return trees_of(shape, remote_cluster.OTHER_MODEL)


@pytest.mark.parametrize("mode", ["lockstep", "ping_pong"])
@pytest.mark.parametrize("shape", SHAPES)
def test_draft_workers(mode: str, shape: str) -> None:
    """Parents travel with the tokens; two draft workers of which one is lost on the way."""
    rng = random.Random(3)
    cluster = Cluster(
        Faults(delay_s=(0.0, 0.01)),
        num_drafters=2,
        capabilities=replace(CAPABILITIES, shape="tree", looks_ahead=False),
        make_drafter=partial(make_drafter, SHAPES[shape]),
        mode=mode,  # type: ignore[arg-type]
        num_draft_tokens=9,
    )
    requests = [a_request(f"r{index}", rng) for index in range(10)]
    tokens: dict[RequestId, list[int]] = {one.request_id: [] for one in requests}
    for index, one in enumerate(requests):
        cluster.engine.add_request(one)
        cluster.step(tokens)
        if index == 5:
            cluster.stop_drafter(next(iter(cluster.drafters)), told=True)
    while cluster.engine.has_work:
        cluster.step(tokens)
    for one in requests:
        assert tokens[one.request_id] == remote_cluster.expected(one)
    metrics = cluster.engine.metrics()
    assert metrics.num_accepted_tokens > 0
    assert metrics.num_moved_kv > 0
    assert metrics.proposals_dropped["malformed"] == 0
