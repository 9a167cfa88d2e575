"""Engines over compiled stages give, token for token, what the same ranks without stages give compiled.

Nothing is excused: rows have the same bits (`tests/specdec/model/parallel/test_compiled_stages.py`). Two
stages of two ranks are compared with two ranks that hold all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.core.errors import TransportError
from specdec.core.plan import TargetStep
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.ranks.leader import LeadingTarget
from specdec.model.config import CompileConfig
from specdec.model.graphs import CompiledForward
from specdec.model.parallel.group import RankGroup
from specdec.model.pipeline import StageRunner
from tests.architectures import ARCHITECTURES, save_model
from tests.pairwise import mostly_full
from tests.rank_pool import BreakablePools, Pools
from tests.specdec.engine.ranked_engines import (
    CONSTRAINED,
    GREEDY,
    PLAIN,
    SAMPLED,
    SHAPED,
    SHAPED_GREEDY,
    Served,
    config_of,
    drafting,
    failure_after_a_death,
    generate,
    lead,
    logprobs_of_stream,
    serve,
    serve_logprobs,
    served,
)

Folders = Callable[[str], Path]

NUM_LAYERS = 5
GRIDS = {"2": (2, 2), "3": (3, 3), "2x2": (4, 2)}
"""Ranks and stages of: two stages, three, and two of two ranks each."""
METHODS = ("ngram", "draft_model", "none")
DTYPES = ("float32", "bfloat16")
SETTINGS = tuple(product(GRIDS, METHODS))
COVER = tuple(
    (name, *setting, dtype)
    for name, setting, dtype in zip(ARCHITECTURES, cycle(SETTINGS), cycle(DTYPES), strict=False)
)
"""Every architecture in one setting, and every setting; with both dtypes, every pair."""
NUM_SETTINGS = len(SETTINGS)
"""So many of them have every setting and every pair. That rows of every architecture have the same bits over
stages is seen without engines, too."""
QUICK = (COVER[0], COVER[5], COVER[7])
"""Every grid, every method and both dtypes."""
KINDS = [GREEDY, PLAIN, SAMPLED, SHAPED]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @cache
    def make(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(f"compiled-pipeline-{architecture}")
        save_model(folder, architecture, num_layers=NUM_LAYERS)
        return folder

    return make


def compiled_config(
    folder: Path, size: int = 1, *, dtype: str = "float32", stages: int = 1, **others: Any
) -> EngineConfig:
    config = config_of(folder, size, stages=stages, **others)
    changes = {"compile": CompileConfig(), "dtype": dtype}
    return config.model_copy(update={"target": config.target.model_copy(update=changes)})


def compiled_of(engine: Engine) -> CompiledForward:
    target: Any = engine._parts.target
    compiled = target.runner.graphs
    assert isinstance(compiled, CompiledForward)
    if "compiler" in compiled.failure:
        pytest.skip("no compiled forward here")
    assert (compiled.state, compiled.failure) == ("ready", "")
    return compiled


def expected_of(
    rank_pool: Pools, config: EngineConfig, use: Callable[..., Any], serve_: Callable[..., Any], *args: Any
) -> Any:
    """What the ranks without stages give: one process, or tensor parallel ranks."""
    if config.target.num_ranks > 1:
        return rank_pool(config.target.num_ranks).run(serve_, config, *args)[0]
    with Engine(config) as engine:
        engine.warm_up()
        compiled_of(engine)
        return use(engine, *args)


def check(
    rank_pool: Pools,
    folder: Path,
    grid: str,
    params: Sequence[SamplingParams],
    *,
    method: str = "none",
    dtype: str = "float32",
    num_blocks: int = 60,
) -> Served:
    size, stages = GRIDS[grid]
    whole = compiled_config(folder, size // stages, dtype=dtype)
    expected = expected_of(rank_pool, whole, served, serve, params)
    config = compiled_config(
        folder, size, stages=stages, dtype=dtype, num_blocks=num_blocks, **drafting(method, folder)
    )
    answer: Served = rank_pool(size).run(serve, config, params)[0]
    assert answer.streams == expected.streams
    return answer


@pytest.mark.parametrize(
    ("architecture", "grid", "method", "dtype"),
    [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.full]) for one in COVER],
)
def test_same_tokens(
    rank_pool: Pools, folder_of: Folders, architecture: str, grid: str, method: str, dtype: str
) -> None:
    answer = check(rank_pool, folder_of(architecture), grid, [GREEDY, PLAIN], method=method, dtype=dtype)
    assert (answer.num_accepted > 0) == (method != "none")


def test_the_cover_has_every_pair() -> None:
    first = COVER[:NUM_SETTINGS]
    assert {(grid, method) for _, grid, method, _ in first} == set(SETTINGS)
    assert {(grid, dtype) for _, grid, _, dtype in first} == set(product(GRIDS, DTYPES))
    assert {(method, dtype) for _, _, method, dtype in first} == set(product(METHODS, DTYPES))
    assert {architecture for architecture, *_ in COVER} == set(ARCHITECTURES)
    _, *quick = zip(*QUICK, strict=True)
    assert list(map(set, quick)) == [set(GRIDS), set(METHODS), set(DTYPES)]


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("grid", "method"), SETTINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_tokens_in_every_setting(
    rank_pool: Pools, folder_of: Folders, architecture: str, grid: str, method: str, dtype: str
) -> None:
    check(rank_pool, folder_of(architecture), grid, KINDS, method=method, dtype=dtype)


@pytest.mark.parametrize(("grid", "method"), [*zip(GRIDS, METHODS, strict=True)])
def test_same_tokens_with_shaped_logits(rank_pool: Pools, folder_of: Folders, grid: str, method: str) -> None:
    params = [SHAPED, SHAPED_GREEDY, SAMPLED, CONSTRAINED]
    check(rank_pool, folder_of("llama"), grid, params, method=method, dtype="bfloat16")


@pytest.mark.parametrize("grid", mostly_full(GRIDS, ["2x2"]))
def test_same_tokens_when_sequences_are_preempted(rank_pool: Pools, folder_of: Folders, grid: str) -> None:
    """The cache holds about half of what runs at once."""
    answer = check(
        rank_pool,
        folder_of("mistral"),
        grid,
        [SAMPLED],
        method="draft_model",
        dtype="bfloat16",
        num_blocks=18,
    )
    assert answer.num_preemptions > 0


@pytest.mark.parametrize("grid", mostly_full(GRIDS, ["2x2"]))
def test_same_logprobs(rank_pool: Pools, folder_of: Folders, grid: str) -> None:
    size, stages = GRIDS[grid]
    folder = folder_of("qwen3")
    whole = compiled_config(folder, size // stages, dtype="bfloat16")
    expected = expected_of(rank_pool, whole, logprobs_of_stream, serve_logprobs)
    assert len(expected) == 6
    config = compiled_config(folder, size, stages=stages, dtype="bfloat16", **drafting("draft_model", folder))
    assert rank_pool(size).run(serve_logprobs, config)[0] == expected


def test_eager_stages_would_be_seen(rank_pool: Pools, folder_of: Folders) -> None:
    config = compiled_config(folder_of("qwen3"), 2, stages=2, dtype="bfloat16")
    target = config.target.model_copy(update={"compile": CompileConfig(mode="off")})
    eager = config.model_copy(update={"target": target})
    ours, others = (rank_pool(2).run(serve_logprobs, one)[0] for one in (config, eager))
    assert ours != others


# ------------------------------------------------------------------------------------- how it is done


def count_forwards(group: RankGroup, config: EngineConfig) -> Any:
    """Rank 0: rounds, and how many of them did not forward and choose in one call."""
    own = StageRunner.forward
    num_forwards = num_rounds = 0

    def forward(self: StageRunner, *args: Any) -> torch.Tensor:
        nonlocal num_forwards
        num_forwards += 1
        return own(self, *args)

    def use(engine: Engine) -> tuple[int, int]:
        nonlocal num_rounds
        target: Any = engine._parts.target
        assert isinstance(target, LeadingTarget)
        run = target._run

        def counted(step: TargetStep) -> Any:
            nonlocal num_rounds
            num_rounds += bool(step.works)
            return run(step)

        target._run = counted  # type: ignore[method-assign]
        compiled_of(engine)
        generate(engine, [PLAIN])
        return num_rounds, num_forwards

    StageRunner.forward = forward  # type: ignore[method-assign]
    try:
        return lead(group, config, use)
    finally:
        StageRunner.forward = own  # type: ignore[method-assign]


def test_the_last_stage_chooses_in_one_call_with_its_forward(rank_pool: Pools, folder_of: Folders) -> None:
    config = compiled_config(folder_of("llama"), 2, stages=2)
    target = config.target.model_copy(update={"pipeline_micro_batch_tokens": 64})
    config = config.model_copy(update={"target": target})
    num_rounds, num_forwards = rank_pool(2).run(count_forwards, config)[0]
    assert num_rounds > 10
    assert num_forwards == 0


# -------------------------------------------------------------------------------------- life and death


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("grid", ["2", "2x2"])
def test_an_engine_starts_its_stages(rank_pool: Pools, folder_of: Folders, grid: str) -> None:
    size, stages = GRIDS[grid]
    folder = folder_of("llama")
    whole = compiled_config(folder, size // stages, dtype="bfloat16")
    expected = expected_of(rank_pool, whole, served, serve, KINDS)
    config = compiled_config(folder, size, stages=stages, dtype="bfloat16", **drafting("draft_model", folder))
    with Engine(config) as engine:
        compiled_of(engine)
        assert generate(engine, KINDS) == expected.streams
        assert engine.metrics().num_accepted_tokens > 50


@pytest.mark.parametrize(
    ("grid", "victim"),
    [
        pytest.param("2", 1, id="first stage"),
        pytest.param("3", 1, id="stage between", marks=pytest.mark.full),
        pytest.param("2x2", 2, id="in the first stage", marks=pytest.mark.full),
    ],
)
def test_a_dead_rank_ends_the_group(
    breakable_pool: BreakablePools, folder_of: Folders, tmp_path: Path, grid: str, victim: int
) -> None:
    size, stages = GRIDS[grid]
    with breakable_pool(size) as pool:
        config = compiled_config(folder_of("llama"), size, stages=stages)
        failure = failure_after_a_death(pool, config, victim, tmp_path)
        assert isinstance(failure.error, TransportError)
        assert "lost a peer" in failure.text
