"""Medusa and Hydra by configuration: heads from a folder as it is published, drafting beside the target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.core.errors import CheckpointError, ConfigError
from specdec.core.sampling_params import SamplingParams
from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.files import write_tensors
from specdec.drafters.checkpoints.hydra import save_hydra
from specdec.drafters.checkpoints.medusa import save_medusa
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.engine.engine import Engine
from specdec.proposers.config import SpeculativeConfig
from tests.pairwise import mostly_full
from tests.rank_pool import Pools
from tests.specdec.engine.configured_heads import config_of, serve
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.lookup_watch import LookupWatch
from tests.specdec.engine.sampling_kinds import GREEDY, KINDS
from tests.specdec.engine.tiny_models import PROMPTS, Models

pytestmark = pytest.mark.usefixtures("one_thread")
FolderOf = Callable[[str], Path]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(Models(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def folder_of(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """Folders of heads whose last matrices are fitted to texts of the target; the rest changes nothing."""
    made: dict[str, Path] = {}
    target = TargetParts.of(bench.models.load("llama").model)
    weights = bench.fitted("llama", (-1,))

    @torch.no_grad()
    def make(kind: str) -> Path:
        if kind in made:
            return made[kind]
        folder = made[kind] = tmp_path_factory.mktemp(kind)
        if kind == "medusa":
            medusa = Medusa(target, num_heads=len(weights))
            for head, weight in zip(medusa.heads, weights, strict=True):
                head[-1].weight.copy_(weight.T)  # type: ignore[index]
            save_medusa(medusa, folder, base_model="tiny")
            return folder
        hydra = Hydra(target, num_heads=len(weights))
        hydra.start_from_target()
        for lm_head, weight in zip(hydra.lm_heads, weights, strict=True):
            lm_head.weight.copy_(weight.T)  # type: ignore[operator]
        save_hydra(hydra, folder, base_model="tiny")
        return folder

    return make


@pytest.mark.cover(1)
@pytest.mark.parametrize("method", ["medusa", "hydra"])
@pytest.mark.parametrize("kind", ["greedy", "plain", pytest.param("penalties", marks=pytest.mark.full)])
def test_heads_of_a_folder_draft_and_nothing_shows(
    bench: Bench, folder_of: FolderOf, method: str, kind: str
) -> None:
    config = config_of(bench, folder_of(method), method, cache={"block_size": 4, "num_blocks": 20})
    with Engine(config) as engine:
        results = engine.generate(PROMPTS, KINDS[kind])
        metrics = engine.metrics()
        engine.check_integrity()
    assert [one.token_ids for one in results] == bench.alone("llama", kind)
    assert metrics.num_preemptions > 0
    assert metrics.num_accepted_tokens > 0.2 * metrics.num_draft_tokens > 10


@pytest.mark.parametrize("kind", ["greedy", "plain"])
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("medusa", {}),
        ("hydra", {"tree": {"shape": "static", "widths": [3, 2]}, "num_speculative_tokens": 9}),
        ("hydra", {"controller": "goodput", "profile_seconds": 0.0}),
        ("self", {"kv": {"policy": "streaming", "budget": 16, "floor": 16}}),
        ("layerskip", {"exit_layer": 1}),
    ],
)
def test_a_lookup_goes_before_what_drafts_at_the_target(
    bench: Bench,
    folder_of: FolderOf,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    more: dict[str, Any],
    kind: str,
) -> None:
    watch = LookupWatch()
    watch.begin(monkeypatch)
    folder = folder_of(method) if method in ("medusa", "hydra") else None
    more = {"lookup_first": 2, "cache": {"block_size": 4, "num_blocks": 20}, **more}
    with Engine(config_of(bench, folder, method, **more)) as engine:
        results = engine.generate(PROMPTS, KINDS[kind])
        again = engine.generate(PROMPTS, KINDS[kind])
        metrics = engine.metrics()
        engine.check_integrity()
    alone = bench.alone("llama", kind)
    assert [one.token_ids for one in results] == alone
    assert [one.token_ids for one in again] == alone
    assert metrics.num_preemptions > 0
    assert len(watch.looked_up) > 10
    assert len(watch.at_target) > 10
    assert metrics.num_draft_tokens == sum(watch.looked_up) + sum(watch.at_target)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("medusa", {}),
        ("hydra", {"tree": {"shape": "static", "widths": [3, 2]}, "num_speculative_tokens": 9}),
        pytest.param("hydra", {}, marks=pytest.mark.full),
    ],
)
def test_compiled_they_draft_what_they_draft_eagerly(
    bench: Bench, folder_of: FolderOf, method: str, more: dict[str, Any]
) -> None:
    counted: list[tuple[int, int]] = []
    for mode in ("off", "auto"):
        config = config_of(bench, folder_of(method), method, compile={"mode": mode}, **more)
        with Engine(config) as engine:
            engine.warm_up()
            assert [one.state for one in engine.idle_work] == ["off", "off" if mode == "off" else "ready"]
            for kind in ("greedy", "plain"):
                results = engine.generate(PROMPTS, KINDS[kind])
                assert [one.token_ids for one in results] == bench.alone("llama", kind)
            metrics = engine.metrics()
            counted.append((metrics.num_draft_tokens, metrics.num_accepted_tokens))
    assert counted[0] == counted[1]
    assert counted[0][1] > 20


def test_heads_are_one_of_several_drafters(bench: Bench, folder_of: FolderOf) -> None:
    """Half the requests have heads, which draft in the target's step, half a lookup, in one batch."""
    heads = {"name": "heads", "method": "medusa", "model": str(folder_of("medusa")), "share": 0.5}
    lookup = {"name": "lookup", "method": "ngram", "prompt_lookup_min": 1, "share": 0.5}
    config = config_of(
        bench,
        Path(),
        "several",
        model=None,
        drafters=[lookup, heads],
        cache={"block_size": 4, "num_blocks": 20},
    )
    with Engine(config) as engine:
        results = engine.generate(PROMPTS, KINDS["plain"])
        metrics = engine.metrics()
        engine.check_integrity()
    assert [one.token_ids for one in results] == bench.alone("llama", "plain")
    assert metrics.num_preemptions > 0
    assert metrics.by_drafter["heads"].num_accepted_tokens > 0
    assert metrics.by_drafter["lookup"].num_drafts > 0


def test_the_controller_measures_what_heads_cost(bench: Bench, folder_of: FolderOf, tmp_path: Path) -> None:
    config = config_of(
        bench, folder_of("medusa"), controller="goodput", profile_seconds=0.3, profile_dir=str(tmp_path)
    )
    with Engine(config) as engine:
        results = engine.generate(PROMPTS, GREEDY)
        assert [one.token_ids for one in results] == bench.alone("llama", "greedy")
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize("rule", mostly_full(["rejection", "block", "multi_round"], ["rejection"]))
def test_rules_that_look_at_probabilities_get_them(bench: Bench, folder_of: FolderOf, rule: str) -> None:
    """They stay in the process. Greedy tokens are the same by every rule; what is sampled is accepted."""
    with Engine(config_of(bench, folder_of("medusa"), rejection_sample_method=rule)) as engine:
        results = engine.generate(PROMPTS, GREEDY)
        assert [one.token_ids for one in results] == bench.alone("llama", "greedy")
        before = engine.metrics().num_accepted_tokens
        engine.generate(PROMPTS, SamplingParams(temperature=0.8, max_tokens=16, seed=3))
        assert engine.metrics().num_accepted_tokens > before


def test_medusa_drafts_for_a_target_over_two_ranks(
    bench: Bench, folder_of: FolderOf, rank_pool: Pools
) -> None:
    config = config_of(bench, folder_of("medusa"), target={"tensor_parallel_size": 2})
    streams, num_accepted = rank_pool(2).run(serve, config)[0]
    assert streams == bench.alone("llama", "greedy")
    assert num_accepted > 20


def test_what_a_folder_does_not_hold_is_said(bench: Bench, folder_of: FolderOf) -> None:
    with pytest.raises(ConfigError, match=r"method: medusa, but .* holds Hydra: write method: hydra"):
        Engine(config_of(bench, folder_of("hydra"), "medusa"))
    with pytest.raises(CheckpointError, match="no drafter of a known format"):
        Engine(config_of(bench, bench.models.load("llama").path, "medusa"))


@pytest.mark.parametrize("is_beside", [False, True], ids=["alone", "beside their target"])
def test_pickled_heads_are_read_where_that_is_asked_for_alone(
    bench: Bench, folder_of: FolderOf, tmp_path: Path, is_beside: bool
) -> None:
    # Not above: what is here is used where engines are tested alone, too.
    from deploy.preflight import check_models

    published = folder_of("medusa")
    config = json.loads((published / "config.json").read_text())
    if is_beside:
        target = Path(bench.models.load("llama").path)
        (tmp_path / "model.safetensors").symlink_to(target / "model.safetensors")
        config |= json.loads((target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tensors(tmp_path / "medusa_lm_head.pt", load_file(published / "medusa_lm_head.safetensors"))
    unasked, asked = (config_of(bench, tmp_path, allow_pickled_weights=allowed) for allowed in (False, True))
    for refuses in (Engine, check_models):
        with pytest.raises(CheckpointError, match=r"medusa_lm_head\.pt is pickled, and only safetensors are"):
            refuses(unasked)
    check_models(asked)
    with Engine(asked) as engine:
        assert [one.token_ids for one in engine.generate(PROMPTS, GREEDY)] == bench.alone("llama", "greedy")
        assert engine.metrics().num_accepted_tokens > 20


def test_settings_that_heads_do_not_have_are_refused() -> None:
    for fields, message in (
        ({}, "method medusa needs `model`"),
        ({"model": "x", "device": "cuda"}, "device: heads run in the target's process"),
        ({"model": "x", "dtype": "bfloat16"}, "dtype: heads run in the target's process"),
        ({"model": "x", "overlap": "ping_pong"}, "needs a draft model that runs beside the target"),
        ({"model": "x", "kv": {"policy": "streaming", "budget": 64}}, "kv.policy"),
        ({"model": "x", "tree": {"shape": "static", "widths": [3, 2]}}, "9 nodes, of which"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeConfig.model_validate({"method": "medusa", **fields})
