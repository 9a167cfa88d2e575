"""Hydra++ and parallel heads by configuration, whose heads have layers with K/V; and trees of all heads.

The heads are fitted to texts of the target, so that a state, a position or K/V of elsewhere costs acceptance:
it has to be exactly what the modules predict over whole rows of what transformers computes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.core.sampling_params import SamplingParams
from specdec.drafters.attention import CausalRows
from specdec.drafters.base import SequentialHeads, TargetParts
from specdec.drafters.checkpoints.hydra import save_hydra
from specdec.drafters.checkpoints.medusa import save_medusa
from specdec.drafters.checkpoints.parallel_heads import save_parallel_heads
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.parallel_heads import ParallelHeads
from specdec.engine.engine import Engine
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.heads import Heads
from specdec.tree.static import StaticTree
from specdec.tree.topology import ROOT
from tests.rank_pool import Pools
from tests.specdec.engine.configured_heads import config_of, serve
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.fitted_drafters import NUM_HEADS, fit_heads
from tests.specdec.engine.linear_heads import hidden_of
from tests.specdec.engine.sampling_kinds import GREEDY, KINDS
from tests.specdec.engine.tiny_models import PROMPTS, Models

pytestmark = pytest.mark.usefixtures("one_thread")
Fitted = Callable[[str], Heads]
METHOD_OF = {"hydra++": "hydra"}
CHAIN = StaticTree.of_widths((1, 1, 1), (1.0,))
WIDTHS = (3, 2, 1)
TREE = StaticTree.of_paths([[0], [0, 0], [1], [0, 0, 0], [2], [0, 1], [1, 0], [0, 1, 0], [1, 0, 0]])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Models(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def fitted(bench: Bench) -> Fitted:
    made: dict[str, Heads] = {}
    target = TargetParts.of(bench.models.reference("llama"))

    def make(kind: str) -> Heads:
        if kind not in made:
            torch.manual_seed(0)
            heads: Heads
            if kind == "medusa":
                heads = Medusa(target, num_heads=NUM_HEADS)
                heads.start_from_target()
            elif kind == "parallel_heads":
                heads = ParallelHeads(target, num_heads=NUM_HEADS)
            else:
                heads = Hydra(target, num_heads=NUM_HEADS, has_prefix_layer=kind == "hydra++")
                heads.start_from_target()
            fit_heads(heads, bench)
            made[kind] = heads.requires_grad_(requires_grad=False).eval()
        return made[kind]

    return make


@pytest.fixture(scope="module")
def folder_of(
    bench: Bench, fitted: Fitted, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            save: Any = {"medusa": save_medusa, "parallel_heads": save_parallel_heads}.get(kind, save_hydra)
            save(fitted(kind), made[kind], base_model="tiny")
        return made[kind]

    return make


@torch.no_grad()
def num_standing(heads: Heads, row: torch.Tensor, text: list[int], length: int, shape: StaticTree) -> int:
    """How far the greedy tree of a shape behind the first `length` tokens of a text goes with it."""
    places = {place: node for node, place in enumerate(zip(shape.parents, shape.ranks, strict=True))}
    node = ROOT
    for depth, token_id in enumerate(text[length : length + NUM_HEADS]):
        if isinstance(heads, SequentialHeads):
            logits = heads.logits(depth, row, torch.tensor(text[length - 1 : length + depth]))
        else:
            logits = heads.logits(row)[depth]
        rank = logits.argsort(descending=True).tolist().index(token_id)
        if (node, rank) not in places:
            return depth
        node = places[node, rank]
    return min(NUM_HEADS, len(text) - length)


@torch.no_grad()
def predicted(bench: Bench, heads: Heads, shape: StaticTree) -> tuple[int, int]:
    """Return how many tokens are drafted and accepted, by the module alone on what transformers computes."""
    num_drafted = num_accepted = 0
    for prompt, stream in zip(PROMPTS, bench.alone("llama", "greedy"), strict=True):
        text = [*prompt, *stream]
        states = hidden_of(bench.models.reference("llama"), text, heads.hidden_layers)
        rows = heads.prepare(states[None], torch.arange(len(text))[None], CausalRows())[0]
        length = len(prompt) + 1
        while length < len(text):
            budget = min(shape.max_nodes, len(text) - length - 1)
            part = StaticTree(shape.parents[:budget], shape.ranks[:budget])
            stands = num_standing(heads, rows[length - 2], text, length, part)
            num_drafted += budget
            num_accepted += stands
            length += stands + 1
    return num_drafted, num_accepted


def tree_config(shape: StaticTree) -> dict[str, Any]:
    """The configuration of a shape; of the chain, none."""
    if shape == CHAIN:
        return {"num_speculative_tokens": NUM_HEADS}
    paths: dict[int, list[int]] = {ROOT: []}
    for node, (parent, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        paths[node] = [*paths[parent], rank]
    tree = {"shape": "static", "paths": [path for node, path in paths.items() if node != ROOT]}
    return {"tree": tree, "num_speculative_tokens": shape.max_nodes}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("hydra++", TREE),
        pytest.param("hydra++", CHAIN, marks=pytest.mark.full),
        pytest.param("parallel_heads", CHAIN, marks=pytest.mark.full),
        pytest.param("medusa", TREE, marks=pytest.mark.full),
        pytest.param("hydra", TREE, marks=pytest.mark.full),
        pytest.param("parallel_heads", TREE, marks=pytest.mark.full),
    ],
    ids=lambda one: one if isinstance(one, str) else "chain" if one == CHAIN else "tree",
)
def test_acceptance_is_what_the_module_predicts(
    bench: Bench, fitted: Fitted, folder_of: Callable[[str], Path], kind: str, shape: StaticTree
) -> None:
    """Prompts in chunks, alone and in company."""
    num_drafted, num_accepted = predicted(bench, fitted(kind), shape)
    assert num_accepted > 0.15 * num_drafted, "not fitted"
    config = config_of(bench, folder_of(kind), METHOD_OF.get(kind, kind), **tree_config(shape))
    with Engine(config) as engine:
        alone = [engine.generate([one], GREEDY)[0].token_ids for one in PROMPTS]
        metrics = engine.metrics()
        counted = metrics.num_draft_tokens, metrics.num_accepted_tokens
        results = engine.generate(PROMPTS, GREEDY)
        engine.check_integrity()
    assert alone == [one.token_ids for one in results] == bench.alone("llama", "greedy")
    assert counted == (num_drafted, num_accepted)


DYNAMIC = {"tree": {"shape": "dynamic", "top_k": 3, "depth": 4}, "num_speculative_tokens": 8}
STATIC = {"tree": {"shape": "static", "widths": list(WIDTHS)}, "num_speculative_tokens": 15}


@pytest.mark.parametrize(
    ("kind", "sampling", "more"),
    [
        ("hydra++", "plain", DYNAMIC),
        ("hydra++", "greedy", {"cache_blocks": 12}),
        pytest.param("hydra++", "plain", {}, marks=pytest.mark.full),
        pytest.param("parallel_heads", "penalties", {}, marks=pytest.mark.full),
        pytest.param("medusa", "cut", DYNAMIC, marks=pytest.mark.full),
        pytest.param("medusa", "plain", STATIC, marks=pytest.mark.full),
        pytest.param("hydra", "penalties", STATIC, marks=pytest.mark.full),
        pytest.param("parallel_heads", "cut", DYNAMIC, marks=pytest.mark.full),
        pytest.param("parallel_heads", "greedy", {"cache_blocks": 12}, marks=pytest.mark.full),
    ],
)
def test_nothing_of_it_shows(
    bench: Bench, folder_of: Callable[[str], Path], kind: str, sampling: str, more: dict[str, Any]
) -> None:
    """With preemptions of the target; and with a cache of the heads' that does not hold all requests."""
    more = dict(more)
    own = {"block_size": 4, "num_blocks": more.pop("cache_blocks", 200)}
    config = config_of(
        bench, folder_of(kind), METHOD_OF.get(kind, kind), cache={"block_size": 4, "num_blocks": 20}, **more
    )
    speculative = config.speculative_config.model_dump() | {"cache": own}
    config = config.model_copy(update={"speculative_config": SpeculativeConfig.model_validate(speculative)})
    with Engine(config) as engine:
        results = engine.generate(PROMPTS, KINDS[sampling])
        metrics = engine.metrics()
        engine.check_integrity()
    assert [one.token_ids for one in results] == bench.alone("llama", sampling)
    assert metrics.num_preemptions > 0
    assert metrics.num_accepted_tokens > 10


@pytest.mark.full
def test_trees_of_the_targets_noise_pay_for_sampled_texts(
    bench: Bench, folder_of: Callable[[str], Path]
) -> None:
    """More of what the target samples is among its best three than is the best."""
    accepted = []
    for more in ({"num_speculative_tokens": NUM_HEADS}, STATIC):
        config = config_of(bench, folder_of("medusa"), cache={"block_size": 4, "num_blocks": 200}, **more)
        with Engine(config) as engine:
            for prompt in PROMPTS:
                engine.generate([prompt], KINDS["hot"])
            metrics = engine.metrics()
        accepted.append(metrics.num_accepted_tokens / metrics.num_drafts)
    assert accepted[1] > 1.15 * accepted[0] > 0


def test_a_cached_prefix_is_read_from_its_rows(bench: Bench, folder_of: Callable[[str], Path]) -> None:
    """The target computes nothing of it, and the heads draft as behind a prefix that was computed."""
    with Engine(config_of(bench, folder_of("hydra++"), "hydra", num_speculative_tokens=3)) as engine:
        prompt = PROMPTS[6]
        engine.generate([prompt], GREEDY)
        before = engine.metrics()
        num_hits, num_accepted = before.prefix_cache_hits, before.num_accepted_tokens
        (result,) = engine.generate([prompt], GREEDY)
        after = engine.metrics()
    assert result.token_ids == bench.alone("llama", "greedy")[6]
    assert after.prefix_cache_hits > num_hits
    # Only the token behind the cached blocks is computed, and drafted behind at once: rounds begin elsewhere.
    assert after.num_accepted_tokens - num_accepted > 0.8 * num_accepted > 0


@pytest.mark.parametrize(
    ("rule", "tree"),
    [
        ("multi_round", STATIC),
        pytest.param("rejection", {}, marks=pytest.mark.full),
        pytest.param("multi_round", DYNAMIC, marks=pytest.mark.full),
    ],
)
def test_rules_that_look_at_probabilities_get_them(
    bench: Bench, folder_of: Callable[[str], Path], rule: str, tree: dict[str, Any]
) -> None:
    config = config_of(bench, folder_of("hydra++"), "hydra", rejection_sample_method=rule, **tree)
    with Engine(config) as engine:
        results = engine.generate(PROMPTS, GREEDY)
        assert [one.token_ids for one in results] == bench.alone("llama", "greedy")
        before = engine.metrics().num_accepted_tokens
        engine.generate(PROMPTS, SamplingParams(temperature=0.4, max_tokens=16, seed=3))
        assert engine.metrics().num_accepted_tokens > before


@pytest.mark.parametrize(
    ("kind", "target", "more"),
    [
        ("hydra++", {"tensor_parallel_size": 2}, {}),
        pytest.param("parallel_heads", {"pipeline_parallel_size": 2}, {}, marks=pytest.mark.full),
        pytest.param("parallel_heads", {"tensor_parallel_size": 2}, {}, marks=pytest.mark.full),
        pytest.param("hydra", {"tensor_parallel_size": 2}, STATIC, marks=pytest.mark.full),
        pytest.param("hydra++", {"pipeline_parallel_size": 2}, DYNAMIC, marks=pytest.mark.full),
        pytest.param("medusa", {"pipeline_parallel_size": 2}, STATIC, marks=pytest.mark.full),
    ],
)
def test_heads_draft_for_a_target_over_two_ranks(
    bench: Bench,
    folder_of: Callable[[str], Path],
    rank_pool: Pools,
    kind: str,
    target: dict[str, int],
    more: dict[str, Any],
) -> None:
    """What they compute with of the target is read in full where they are."""
    config = config_of(bench, folder_of(kind), METHOD_OF.get(kind, kind), target=target, **more)
    streams, num_accepted = rank_pool(2).run(serve, config)[0]
    assert streams == bench.alone("llama", "greedy")
    assert num_accepted > 20
