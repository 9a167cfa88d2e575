"""Engines over ranks that run compiled give the tokens of one process (`test_ranks` says what is excused)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.core.errors import TransportError
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.ranks.follower import follow
from specdec.engine.ranks.leader import LeadingTarget
from specdec.model.config import CompileConfig
from specdec.model.graphs import CompiledForward
from specdec.model.parallel.group import RankGroup
from tests.rank_pool import BreakablePools, Failure, Pools, RankPool
from tests.specdec.engine.ranked_engines import (
    GREEDY,
    NUM_TOKENS,
    PLAIN,
    PROMPTS,
    REPETITIVE,
    SAMPLED,
    SHAPED,
    Served,
    config_of,
    folder_of,
    generate,
    is_excused,
    leading_engine,
    serve,
)

__all__ = ["folder_of"]
KINDS = {"llama": [GREEDY, PLAIN, SAMPLED, SHAPED]}
FEWER_KINDS = [GREEDY, PLAIN]


def compiled_config(folder: Path, size: int, **speculative: Any) -> EngineConfig:
    config = config_of(folder, size, **speculative)
    return config.model_copy(update={"target": config.target.model_copy(update={"compile": CompileConfig()})})


def draft_of(folder: Path, size: int = 1) -> dict[str, Any]:
    return {
        "method": "draft_model",
        "model": str(folder),
        "draft_tensor_parallel_size": size,
        "cache": {"num_blocks": 60, "block_size": 4},
    }


def check_streams(
    pool: RankPool, folder: Path, streams: list[list[int]], params: Sequence[SamplingParams]
) -> int:
    """Compare with one eager process; return the number of excused divergences."""
    with Engine(config_of(folder)) as engine:
        expected = generate(engine, params)
    prompts = [prompt for _ in params for prompt in (*PROMPTS, *REPETITIVE)]
    kinds = [one for one in params for _ in (*PROMPTS, *REPETITIVE)]
    num_excused = 0
    for ours, theirs, prompt, kind in zip(streams, expected, prompts, kinds, strict=True):
        if ours != theirs:
            same = next(index for index in range(NUM_TOKENS) if ours[index] != theirs[index])
            assert is_excused(pool, folder, [*prompt, *theirs[:same]], kind), (ours, theirs)
            num_excused += 1
    return num_excused


COVER = [
    ("llama", 4, "draft_model"),
    ("gpt2", 2, "ngram"),
    ("qwen3_moe", 2, "draft_model"),
    ("gemma3", 2, "ngram"),
    ("falcon", 2, "none"),
]


@pytest.mark.parametrize(("architecture", "size", "method"), COVER)
def test_same_tokens(
    rank_pool: Pools, folder_of: Callable[[str], Path], architecture: str, size: int, method: str
) -> None:
    pool, folder = rank_pool(size), folder_of(architecture)
    speculative = draft_of(folder) if method == "draft_model" else {"method": method}
    params = KINDS.get(architecture, FEWER_KINDS)
    answer: Served = pool.run(serve, compiled_config(folder, size, **speculative), params)[0]
    assert check_streams(pool, folder, answer.streams, params) <= 1
    assert (answer.num_accepted > 50) == (method == "draft_model")


@pytest.mark.full
@pytest.mark.slow
def test_an_engine_whose_models_both_run_compiled_over_ranks(
    rank_pool: Pools, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of("llama")
    with Engine(compiled_config(folder, 2, **draft_of(folder, 2))) as engine:
        target = engine._parts.target
        assert isinstance(target, LeadingTarget)
        compiled = target.runner.graphs
        assert isinstance(compiled, CompiledForward)
        if "compiler" in compiled.failure:
            pytest.skip("no compiled forward here")
        assert compiled.state == "ready"
        streams = generate(engine, KINDS["llama"])
        assert engine.metrics().num_accepted_tokens > 50
    assert check_streams(rank_pool(2), folder, streams, KINDS["llama"]) <= 1


def serve_until_a_rank_dies(group: RankGroup, config: EngineConfig) -> None:
    if group.rank > 0:
        follow("target", config, group)
        return
    with leading_engine(group, config) as engine:
        while True:
            engine.generate(PROMPTS, GREEDY)


def test_a_dead_rank_ends_the_group(breakable_pool: BreakablePools, folder_of: Callable[[str], Path]) -> None:
    with breakable_pool(2) as pool:
        config = compiled_config(folder_of("llama"), 2)
        pool.send(serve_until_a_rank_dies, config)
        pool.kill(1)
        failure = pool.receive(0)
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, TransportError)
        assert "lost a peer" in failure.text
