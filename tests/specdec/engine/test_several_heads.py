"""Several drafters of heads beside one target: an A/B test of two trainings, or of two families."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.core.ids import RequestId
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.profiling.plan import ProfilePlan
from specdec.engine.profiling.rounds import measure_profile
from specdec.proposers.config import SpeculativeConfig
from tests.pairwise import mostly_full
from tests.rank_pool import Pools
from tests.specdec.engine.configured_heads import config_of, serve
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.fitted_drafters import FittedDrafters
from tests.specdec.engine.sampling_kinds import GREEDY, KINDS
from tests.specdec.engine.tiny_models import PROMPTS, Models

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"block_size": 4, "num_blocks": 20}
"""Not all requests fit in."""
LOOKUP = {"name": "lookup", "method": "ngram", "prompt_lookup_min": 1}
TREE = {"tree": {"shape": "static", "widths": [2, 1]}}
Drafter = dict[str, Any]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Models(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def fitted(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> FittedDrafters:
    return FittedDrafters(bench, tmp_path_factory)


def heads(fitted: FittedDrafters, kind: str, **more: Any) -> Drafter:
    name = kind.split(maxsplit=1)[0].replace("++", "_plus")
    method = name.removesuffix("_plus").removesuffix(".1")
    return {"name": name, "method": method, "model": str(fitted.folder_of(kind)), **more}


def several(bench: Bench, drafters: Sequence[Drafter], **more: Any) -> Any:
    return config_of(bench, None, "several", drafters=list(drafters), **more)


PAIRS = [
    ("medusa", "eagle3"),  # of other layers, with a vocabulary of its own
    ("eagle3", "eagle3.1"),  # two of a method, each with K/V of its own
    ("hydra", "eagle"),
    ("eagle", "mtp of three"),
    ("hydra++", "parallel_heads"),
]


@pytest.mark.cover(1)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", mostly_full(list(KINDS), ["greedy", "plain"]))
@pytest.mark.parametrize("compiled", ["off", "auto"])
def test_each_drafts_for_its_share_and_nothing_shows(
    bench: Bench, fitted: FittedDrafters, pair: tuple[str, str], kind: str, compiled: str
) -> None:
    """A third each, and a third have a lookup, in one batch."""
    compilation = {"compile": {"mode": compiled}}
    first, second = (heads(fitted, one, share=0.34, **compilation) for one in pair)
    config = several(bench, [first, {**LOOKUP, "share": 0.32}, second], cache=SMALL)
    with Engine(config) as engine:
        engine.warm_up()
        results = engine.generate(PROMPTS, KINDS[kind])
        engine.check_integrity()
        again = engine.generate(PROMPTS, KINDS[kind])
        metrics = engine.metrics()
    alone = bench.alone("llama", kind)
    assert [one.token_ids for one in results] == alone
    assert [one.token_ids for one in again] == alone
    assert metrics.num_preemptions > 0
    counts = metrics.by_drafter
    assert list(counts) == [first["name"], "lookup", second["name"]]
    for name in (first["name"], second["name"]):
        assert counts[name].num_requests > 0
        assert counts[name].num_draft_tokens > 0
        assert counts[name].draft_s > 0.0
    assert sum(its.num_draft_tokens for its in counts.values()) == metrics.num_draft_tokens
    assert sum(its.num_accepted_tokens for its in counts.values()) == metrics.num_accepted_tokens


@pytest.mark.parametrize("kind", ["medusa", "hydra++", "eagle", "eagle3", "mtp of three"])
@pytest.mark.parametrize("place", [0, 1])
def test_heads_draft_beside_others_what_they_draft_alone(
    bench: Bench, fitted: FittedDrafters, kind: str, place: int
) -> None:
    """They read their own part of the states, wherever it lies."""
    other = "eagle3.1" if kind != "eagle3" else "medusa"
    pair = [heads(fitted, other), heads(fitted, kind, share=1.0)]
    config = several(bench, pair if place else pair[::-1])
    own = heads(fitted, kind)
    counted = []
    alone = bench.alone("llama", "greedy")
    for asked in (config, config_of(bench, Path(own["model"]), own["method"])):
        with Engine(asked) as engine:
            assert [one.token_ids for one in engine.generate(PROMPTS, GREEDY)] == alone
            metrics = engine.metrics()
            counted.append((metrics.num_draft_tokens, metrics.num_accepted_tokens))
    assert counted[0] == counted[1]
    assert counted[0][1] > 20


@pytest.mark.parametrize("seed", range(3))
def test_changes_at_run_time_change_no_token(bench: Bench, fitted: FittedDrafters, seed: int) -> None:
    """Who drafts changes every few rounds: whoever comes reads what it has missed."""
    rng = random.Random(seed)
    drafters = [heads(fitted, "eagle3"), LOOKUP, heads(fitted, "hydra", **TREE), heads(fitted, "eagle")]
    had: dict[RequestId, int] = {}
    with Engine(several(bench, drafters, cache=SMALL, num_speculative_tokens=4)) as engine:
        assert engine._parts.drafters is not None
        engine._parts.drafters.pick = lambda request_id, _: had.setdefault(request_id, rng.randrange(4))
        step = engine.step

        def changing() -> Any:
            if rng.random() < 0.5:
                for request_id in had:
                    had[request_id] = rng.randrange(4)
            return step()

        engine.step = changing  # type: ignore[method-assign]
        for kind in ("plain", "greedy", "plain", "greedy"):
            results = engine.generate(PROMPTS, KINDS[kind])
            engine.check_integrity()
            assert [one.token_ids for one in results] == bench.alone("llama", kind)
        metrics = engine.metrics()
    assert metrics.num_preemptions > 0
    for name in ("eagle3", "hydra", "eagle"):
        assert metrics.by_drafter[name].num_requests > 3
        assert metrics.by_drafter[name].num_accepted_tokens > 0
    assert metrics.num_accepted_tokens > 0.1 * metrics.num_draft_tokens


def test_the_controller_measures_each_and_gives_the_better_one(
    bench: Bench, fitted: FittedDrafters, tmp_path: Path
) -> None:
    drafters = [heads(fitted, "medusa"), heads(fitted, "eagle3")]
    config = several(
        bench, drafters, controller="goodput", profile_seconds=0.5, profile_dir=str(tmp_path / "profiles")
    )
    with Engine(config) as engine:
        results = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=40))
        engine.check_integrity()
    assert [one.token_ids[:10] for one in results] == [one[:10] for one in bench.alone("llama", "greedy")]
    assert list((tmp_path / "profiles").iterdir())


def test_what_heads_cost_is_measured_once_they_have_read(bench: Bench, fitted: FittedDrafters) -> None:
    """With 24 tokens in a step, and contexts of 32 and more: what is timed are drafts of all sequences."""
    drafters = [heads(fitted, "medusa"), heads(fitted, "eagle3"), heads(fitted, "eagle")]
    config = several(bench, drafters, cache={"block_size": 4, "num_blocks": 600})
    with Engine(config) as engine:
        plan = ProfilePlan(
            key="k", max_num_seqs=8, max_num_batched_tokens=24, max_draft_tokens=5, budget_s=20
        )
        profile = measure_profile(engine._parts.target, engine._parts.proposer, plan)
    for points in (profile.draft, *profile.other_drafts):
        assert max(point.num_sequences for point in points) == 8
        assert any(point.context_tokens >= 4 * 32 * point.num_sequences for point in points)
        assert all(point.seconds > 1e-6 for point in points), "nothing was drafted"


@pytest.mark.parametrize("rule", mostly_full(["rejection", "block", "multi_round"], ["block"]))
def test_rules_that_look_at_probabilities_get_those_of_each(
    bench: Bench, fitted: FittedDrafters, rule: str
) -> None:
    drafters = [heads(fitted, one, share=0.5) for one in ("medusa", "eagle")]
    with Engine(several(bench, drafters, rejection_sample_method=rule)) as engine:
        assert [one.token_ids for one in engine.generate(PROMPTS, GREEDY)] == bench.alone("llama", "greedy")
        before = {name: its.num_accepted_tokens for name, its in engine.metrics().by_drafter.items()}
        engine.generate(PROMPTS, SamplingParams(temperature=0.8, max_tokens=16, seed=3))
        after = engine.metrics().by_drafter
    assert all(after[name].num_accepted_tokens > its for name, its in before.items())


@pytest.mark.parametrize("parallel", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_they_draft_for_a_target_over_two_ranks(
    bench: Bench, fitted: FittedDrafters, rank_pool: Pools, parallel: dict[str, int]
) -> None:
    # Of a pipeline, heads read what its last stage has.
    first = "eagle" if "pipeline_parallel_size" in parallel else "eagle3"
    drafters = [heads(fitted, first, share=0.5), heads(fitted, "medusa", share=0.5)]
    streams, num_accepted = rank_pool(2).run(serve, several(bench, drafters, target=parallel))[0]
    assert streams == bench.alone("llama", "greedy")
    assert num_accepted > 20


def test_the_target_is_told_of_heads_alone(fitted: FittedDrafters) -> None:
    drafters = [LOOKUP, heads(fitted, "medusa"), heads(fitted, "eagle")]
    config = SpeculativeConfig.model_validate({"method": "several", "drafters": drafters})
    assert [one.name for one in config.at_target.drafters] == ["medusa", "eagle"]
    assert [one.method for one in config.at_target.choices] == ["medusa", "eagle"]
