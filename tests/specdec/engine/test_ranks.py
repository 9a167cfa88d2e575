"""A target over several ranks gives the tokens that one process gives, whatever drafts for it.

`ranked_engines` says what may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.core.errors import CheckpointError, ResourceError, TransportError
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.ranks.launch import rank_devices
from specdec.kv.config import CacheConfig
from specdec.model import pool_sizing
from specdec.model.loader import load_model
from specdec.model.parallel.group import RankGroup
from specdec.model.runner import ModelRunner
from tests.architectures import ARCHITECTURES, VARIED_ARCHITECTURES, save_model
from tests.pairwise import mostly_full
from tests.rank_pool import BreakablePools, Pools
from tests.specdec.engine.grammar_models import save_byte_level_model
from tests.specdec.engine.ranked_engines import (
    CONSTRAINED,
    CONSTRAINED_GREEDY,
    GREEDY,
    PLAIN,
    PROMPTS,
    RANKS_BY_ARCHITECTURE,
    SAMPLED,
    SHAPED,
    SHAPED_GREEDY,
    assert_same_logprobs,
    check,
    config_of,
    failure_after_a_death,
    folder_of,
    generate,
    is_excused,
    lead,
    logprobs_of_stream,
    serve,
    serve_logprobs,
)

__all__ = ["folder_of"]


@pytest.mark.parametrize("architecture", mostly_full(RANKS_BY_ARCHITECTURE, VARIED_ARCHITECTURES))
def test_same_tokens_over_ranks(
    rank_pool: Pools, folder_of: Callable[[str], Path], architecture: str
) -> None:
    pool = rank_pool(RANKS_BY_ARCHITECTURE[architecture])
    answer = check(pool, folder_of(architecture), [GREEDY, PLAIN], method="ngram")
    assert answer.num_accepted > 0


def serve_twice(group: RankGroup, config: EngineConfig, params: SamplingParams) -> Any:
    """Rank 0: streams of two waves of the same prompts, and how many tokens the second found in the cache."""

    def use(engine: Engine) -> Any:
        waves = [generate(engine, [params]) for _ in range(2)]
        return waves, engine.metrics().prefix_cache_hits

    return lead(group, config, use)


@pytest.mark.parametrize("size", [2, 4])
def test_cached_prefixes_are_those_of_all_ranks(
    rank_pool: Pools, folder_of: Callable[[str], Path], size: int
) -> None:
    """Block tables come from rank 0: a hit there is a hit in every rank."""
    pool = rank_pool(size)
    waves, num_hits = pool.run(serve_twice, config_of(folder_of("llama"), size), PLAIN)[0]
    assert waves[0] == waves[1]
    assert num_hits > 0


def blocks_of_rank(group: RankGroup, config: EngineConfig, available: list[int | None]) -> int | str:
    """Size a pool where every rank's machine has something else left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_sizing, "available_bytes", lambda: available[group.rank])
        loaded = load_model(config.target, None, group)
        try:
            return ModelRunner(loaded, CacheConfig(block_size=4), max_num_seqs=4096).num_blocks
        except ResourceError as error:
            return str(error)


def test_ranks_measure_together_and_agree(rank_pool: Pools, folder_of: Callable[[str], Path]) -> None:
    config = config_of(folder_of("llama"), 2)
    pool = rank_pool(2)
    for available in ([600 << 20, 400 << 20], [None, 400 << 20], [1 << 50, 400 << 20]):
        first, second = pool.run(blocks_of_rank, config, available)
        assert isinstance(first, int)
        assert first == second
        assert first < (200 << 20) // (3 * 2 * 8 * 4 * 4)
    first, second = pool.run(blocks_of_rank, config, [1 << 10, 400 << 20])
    assert "not one request fits" in first
    assert "not one request fits" in second


@pytest.mark.parametrize("architecture", mostly_full(["llama", "gpt2", "olmo2"], ["gpt2", "olmo2"]))
def test_same_tokens_with_a_draft_model_of_one_rank(
    rank_pool: Pools, folder_of: Callable[[str], Path], architecture: str
) -> None:
    answer = check(rank_pool(2), folder_of(architecture), [GREEDY, SAMPLED], method="draft_model")
    assert answer.num_accepted > 50, "the model drafting for itself"


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        pytest.param("llama", "self", marks=pytest.mark.full),
        pytest.param("phi3_longrope", "self", marks=pytest.mark.full),
        ("llama", "self verified"),
        ("gemma2", "self snapkv"),
        ("llama", "layerskip 2"),
    ],
)
def test_same_tokens_when_the_target_drafts_for_itself(
    rank_pool: Pools, folder_of: Callable[[str], Path], architecture: str, method: str
) -> None:
    """All ranks draft what rank 0 drafts, in the step that rank 0 hands out anyway."""
    answer = check(rank_pool(2), folder_of(architecture), [GREEDY, SAMPLED, SHAPED], method=method)
    assert answer.num_accepted > 50


@pytest.mark.parametrize(
    ("size", "method"), [(2, "draft_model"), pytest.param(4, "ngram", marks=pytest.mark.full)]
)
def test_same_tokens_with_shaped_logits(
    rank_pool: Pools, folder_of: Callable[[str], Path], size: int, method: str
) -> None:
    """Each rank changes the columns that it has."""
    params = [SHAPED, SHAPED_GREEDY]
    answer = check(rank_pool(size), folder_of("llama"), params, method=method, max_excused=0)
    assert answer.num_accepted > (50 if method == "draft_model" else 0)


@pytest.mark.parametrize("rule", mostly_full(["rejection", "block", "typical"], ["block"]))
def test_rules_decide_the_same_over_ranks(
    rank_pool: Pools, folder_of: Callable[[str], Path], tmp_path: Path, rule: str
) -> None:
    """Rows are gathered, rank 0 decides; with shaped logits too."""
    folder, params = folder_of("llama"), [GREEDY, SAMPLED, SHAPED]
    save_model(tmp_path, seed=2)
    speculative: dict[str, Any] = {
        "method": "draft_model",
        "model": str(tmp_path),
        "num_speculative_tokens": 3,
        "rejection_sample_method": rule,
        "allow_lossy": rule == "typical",
        "cache": {"num_blocks": 60, "block_size": 4},
    }
    with Engine(config_of(folder, **speculative)) as engine:
        expected = generate(engine, params), engine.metrics().num_accepted_tokens
    assert expected[1] > 20
    ours = rank_pool(2).run(serve, config_of(folder, 2, **speculative), params)[0]
    assert (ours.streams, ours.num_accepted) == expected


@pytest.mark.parametrize(
    ("size", "method"), [(2, "draft_model"), pytest.param(4, "ngram", marks=pytest.mark.full)]
)
def test_same_tokens_with_a_grammar(rank_pool: Pools, tmp_path: Path, size: int, method: str) -> None:
    """Each rank masks the columns that it has."""
    pytest.importorskip("llguidance")
    save_byte_level_model(tmp_path)
    params = [CONSTRAINED, CONSTRAINED_GREEDY]
    answer = check(rank_pool(size), tmp_path, params, method=method, max_excused=0)
    assert answer.num_accepted > (50 if method == "draft_model" else 0)


@pytest.mark.full
@pytest.mark.parametrize("architecture", RANKS_BY_ARCHITECTURE)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_same_tokens_over_ranks_in_every_setting(
    rank_pool: Pools, folder_of: Callable[[str], Path], architecture: str, size: int, method: str
) -> None:
    check(rank_pool(size), folder_of(architecture), [GREEDY, PLAIN, SAMPLED], method=method)


def test_logprobs_over_ranks(rank_pool: Pools, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen3")
    with Engine(config_of(folder)) as engine:
        expected = logprobs_of_stream(engine)
    assert_same_logprobs(rank_pool(2).run(serve_logprobs, config_of(folder, 2))[0], expected)


def test_a_clear_choice_is_not_excused(rank_pool: Pools, folder_of: Callable[[str], Path]) -> None:
    assert not is_excused(rank_pool(2), folder_of("llama"), PROMPTS[1], GREEDY)
    assert not is_excused(rank_pool(2), folder_of("llama"), PROMPTS[1], PLAIN)


# ------------------------------------------------------------------------- ranks started by the engine


DYNAMIC = {"tree": {"shape": "dynamic", "top_k": 3, "depth": 4}, "num_speculative_tokens": 10}
ENTROPY = {"tree": {"shape": "entropy", "top_k": 3, "depth": 3}, "num_speculative_tokens": 8}
STATIC = {"tree": {"shape": "static", "widths": [3, 2]}, "num_speculative_tokens": 9}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target_size", "draft_size", "tree"),
    [
        (1, 2, DYNAMIC),
        *(
            pytest.param(*one, marks=pytest.mark.full)
            for one in ((1, 2, {}), (1, 2, STATIC), (1, 2, ENTROPY), (2, 1, {}), (2, 2, {}), (2, 2, DYNAMIC))
        ),
    ],
)
def test_an_engine_starts_its_ranks(
    folder_of: Callable[[str], Path], target_size: int, draft_size: int, tree: dict[str, Any]
) -> None:
    folder = folder_of("llama")
    draft = {
        **tree,
        "method": "draft_model",
        "model": str(folder),
        "draft_tensor_parallel_size": draft_size,
        "cache": {"num_blocks": 60, "block_size": 4},
    }
    with Engine(config_of(folder)) as engine:
        expected = generate(engine, [GREEDY, SAMPLED])
    with Engine(config_of(folder, target_size, **draft)) as engine:
        assert generate(engine, [GREEDY, SAMPLED]) == expected
        assert engine.metrics().num_accepted_tokens > 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("view", "tree"),
    [
        ({"method": "self"}, DYNAMIC),
        *(
            pytest.param(*one, marks=pytest.mark.full)
            for one in (
                ({"method": "self"}, ENTROPY),
                ({"method": "layerskip", "exit_layer": 2}, DYNAMIC),
                ({"method": "quantized", "quantization": "int8"}, DYNAMIC),
            )
        ),
    ],
)
def test_trees_of_a_target_over_ranks_are_those_of_one_process(
    folder_of: Callable[[str], Path], view: dict[str, Any], tree: dict[str, Any]
) -> None:
    """How likely a token is among all no rank knows alone: they have to grow the same tree."""

    def streams_and_acceptance(size: int) -> tuple[Any, int, int]:
        with Engine(config_of(folder_of("llama"), size, **view, **tree)) as engine:
            streams = generate(engine, [GREEDY, SAMPLED])
            return streams, engine.metrics().num_draft_tokens, engine.metrics().num_accepted_tokens

    alone, over_ranks = streams_and_acceptance(1), streams_and_acceptance(2)
    assert over_ranks[0] == alone[0]
    assert alone[2] > 50
    assert over_ranks[1:] == pytest.approx(alone[1:], rel=0.02)


@pytest.mark.full
@pytest.mark.slow
def test_a_grammar_with_a_draft_model_over_ranks(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    save_byte_level_model(tmp_path)
    draft = {
        "method": "draft_model",
        "model": str(tmp_path),
        "draft_tensor_parallel_size": 2,
        "cache": {"num_blocks": 60, "block_size": 4},
    }
    with Engine(config_of(tmp_path)) as engine:
        expected = generate(engine, [CONSTRAINED])
    with Engine(config_of(tmp_path, 2, **draft)) as engine:
        assert generate(engine, [CONSTRAINED]) == expected


def test_a_dead_rank_ends_the_group(
    breakable_pool: BreakablePools, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    with breakable_pool(2) as pool:
        failure = failure_after_a_death(pool, config_of(folder_of("llama"), 2), 1, tmp_path)
        assert isinstance(failure.error, TransportError)
        assert "lost a peer" in failure.text


def test_what_cannot_be_divided_starts_no_ranks(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many: each would take seconds to say the same."""
    monkeypatch.setattr("specdec.engine.ranks.launch.launch", None)
    folder = folder_of("llama")
    with pytest.raises(CheckpointError, match="4 attention heads cannot be divided over 64 ranks"):
        Engine(config_of(folder, 64))
    draft = {"method": "draft_model", "model": str(folder), "draft_tensor_parallel_size": 3}
    with pytest.raises(CheckpointError, match="4 attention heads cannot be divided over 3 ranks"):
        Engine(config_of(folder, 1, **draft))


def test_devices_of_ranks() -> None:
    assert rank_devices("cpu", 3) == [torch.device("cpu")] * 3
    if not torch.cuda.is_available():
        assert rank_devices("auto", 2) == [torch.device("cpu")] * 2


def test_every_architecture_is_covered() -> None:
    """But for those that differ from another one in what is not cut."""
    assert set(ARCHITECTURES) - set(RANKS_BY_ARCHITECTURE) == {
        "llama3_rope",
        "llama_linear_rope",
        "llama_yarn",
    }
    assert set(RANKS_BY_ARCHITECTURE) <= set(ARCHITECTURES)
