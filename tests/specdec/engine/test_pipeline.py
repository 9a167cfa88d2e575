"""A target in stages gives the tokens that one process gives, whatever drafts for it.

`ranked_engines` says what may differ. Micro-batches of six tokens cut larger rounds into parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.core.errors import TransportError
from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, TargetStep, TargetWork
from specdec.core.sampling_params import LogprobsMode
from specdec.engine.build_target import build_target_part
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.ranks.follower import follow
from specdec.engine.ranks.leader import LeadingTarget
from specdec.model import pipeline
from specdec.model.batch import SequenceSlice
from specdec.model.parallel.group import RankGroup
from tests.architectures import ARCHITECTURES, make_tokenizer, save_model
from tests.pairwise import mostly_full
from tests.rank_pool import BreakablePools, Pools
from tests.specdec.engine.ranked_engines import (
    GREEDY,
    PLAIN,
    PROMPTS,
    SAMPLED,
    SHAPED,
    SHAPED_GREEDY,
    assert_same_logprobs,
    check,
    config_of,
    drafting,
    failure_after_a_death,
    generate,
    is_excused,
    lead,
    logprobs_of_stream,
    serve,
    serve_logprobs,
    served,
)

Folders = Callable[[str], Path]

NUM_LAYERS = 5
GRIDS = {"4": (4, 4), "2": (2, 2), "2x2": (4, 2)}
"""Ranks and stages of: four stages, two, and two of two ranks each."""
METHODS = ("ngram", "draft_model", "none")
SETTINGS = tuple(product(GRIDS, METHODS))
COVER = tuple((name, *setting) for name, setting in zip(ARCHITECTURES, cycle(SETTINGS), strict=False))
"""Every architecture in one setting, and every setting."""
NUM_SETTINGS = len(SETTINGS)
"""So many of them have every setting. Logits of every architecture are compared without engines, too."""
QUICK = (COVER[0], COVER[4], COVER[8])
"""Every grid and every method."""


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @cache
    def make(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(f"pipeline-{architecture}")
        save_model(folder, architecture, num_layers=NUM_LAYERS)
        return folder

    return make


@pytest.mark.parametrize(
    ("architecture", "grid", "method"),
    [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.full]) for one in COVER],
)
def test_same_tokens_over_stages(
    rank_pool: Pools, folder_of: Folders, architecture: str, grid: str, method: str
) -> None:
    size, stages = GRIDS[grid]
    answer = check(rank_pool(size), folder_of(architecture), [GREEDY, PLAIN], method=method, stages=stages)
    assert (answer.num_accepted > 0) == (method != "none")


def test_the_cover_has_every_setting() -> None:
    assert {(grid, method) for _, grid, method in COVER[:NUM_SETTINGS]} == set(SETTINGS)
    assert {grid for _, grid, _ in QUICK} == set(GRIDS)
    assert {method for _, _, method in QUICK} == set(METHODS)
    assert {architecture for architecture, *_ in COVER} == set(ARCHITECTURES)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("grid", "method"), SETTINGS)
def test_same_tokens_over_stages_in_every_setting(
    rank_pool: Pools, folder_of: Folders, architecture: str, grid: str, method: str
) -> None:
    size, stages = GRIDS[grid]
    params = [GREEDY, PLAIN, SAMPLED]
    check(rank_pool(size), folder_of(architecture), params, method=method, stages=stages)


@pytest.mark.parametrize(
    ("grid", "method"),
    [
        pytest.param(grid, method, marks=[] if grid == "4" else [pytest.mark.full])
        for grid, method in zip(GRIDS, METHODS, strict=True)
    ],
)
def test_same_tokens_with_shaped_logits(rank_pool: Pools, folder_of: Folders, grid: str, method: str) -> None:
    size, stages = GRIDS[grid]
    params = [SHAPED, SHAPED_GREEDY, SAMPLED]
    check(rank_pool(size), folder_of("llama"), params, method=method, stages=stages, max_excused=0)


@pytest.mark.parametrize("grid", [pytest.param("4", marks=pytest.mark.full), "2x2"])
def test_rules_decide_the_same_over_stages(
    rank_pool: Pools, folder_of: Folders, tmp_path: Path, grid: str
) -> None:
    size, stages = GRIDS[grid]
    save_model(tmp_path, seed=2)
    speculative = {
        **drafting("draft_model", tmp_path),
        "num_speculative_tokens": 3,
        "rejection_sample_method": "rejection",
    }
    params = [SAMPLED, SHAPED]
    with Engine(config_of(folder_of("llama"), **speculative)) as engine:
        expected = served(engine, params)
    config = config_of(folder_of("llama"), size, stages=stages, **speculative)
    assert rank_pool(size).run(serve, config, params)[0] == expected
    assert expected.num_accepted > 10


@pytest.mark.parametrize("grid", mostly_full(GRIDS, ["4"]))
def test_same_tokens_when_sequences_are_preempted(rank_pool: Pools, folder_of: Folders, grid: str) -> None:
    """The cache holds about half of what runs at once."""
    size, stages = GRIDS[grid]
    answer = check(
        rank_pool(size), folder_of("mistral"), [SAMPLED], method="draft_model", stages=stages, num_blocks=18
    )
    assert answer.num_preemptions > 0


@pytest.mark.cover(1)
@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("grid", GRIDS)
def test_logprobs_over_stages(rank_pool: Pools, folder_of: Folders, grid: str, mode: LogprobsMode) -> None:
    size, stages = GRIDS[grid]
    folder = folder_of("qwen3")
    with Engine(config_of(folder)) as engine:
        expected = logprobs_of_stream(engine, mode)
    config = config_of(folder, size, stages=stages, **drafting("draft_model", folder))
    assert_same_logprobs(rank_pool(size).run(serve_logprobs, config, mode)[0], expected)


def test_a_clear_choice_is_not_excused(rank_pool: Pools, folder_of: Folders) -> None:
    assert not is_excused(rank_pool(4), folder_of("llama"), PROMPTS[1], GREEDY, stages=2)
    assert not is_excused(rank_pool(4), folder_of("llama"), PROMPTS[1], PLAIN, stages=2)


# ------------------------------------------------------------------------------------- how it is done


def count_parts(group: RankGroup, config: EngineConfig) -> Any:
    """In every rank: the number of parts of each round."""
    divide = pipeline.micro_batches
    counts: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> list[list[SequenceSlice]]:
        parts = divide(*args, **kwargs)
        counts.append(len(parts))
        return parts

    pipeline.micro_batches = counted
    try:
        lead(group, config, lambda engine: generate(engine, [GREEDY]))
    finally:
        pipeline.micro_batches = divide
    return counts


def test_stages_work_on_parts_of_a_round(rank_pool: Pools, folder_of: Folders) -> None:
    answers = rank_pool(4).run(count_parts, config_of(folder_of("llama"), 4, stages=4))
    assert all(counts == answers[0] for counts in answers)
    assert max(answers[0]) >= 4


POISON = 77


def run_with_poison(group: RankGroup, config: EngineConfig) -> Any:
    """Rank 0: the tokens of a round whose draft holds a token with NaN as its embedding, and of the next."""
    if group.rank > 0:
        follow("target", config, group)
        return None
    target = LeadingTarget(build_target_part(config, group), group)
    request = RequestId("poisoned")
    admitted = AdmittedSequence(request, seed=1, params=GREEDY, num_prompt_tokens=3, token_ids=(5, 6, 7))
    blocks = tuple(range(1, 10))
    works = [
        TargetWork(request, (5, 6, 7, 8, POISON), 0, 3, 0, blocks),
        TargetWork(request, (8, 9), 3, 2, 0, blocks),
    ]
    tokens: list[tuple[int, ...]] = []
    for step_id, work in enumerate(works):
        target.submit(TargetStep(step_id, (work,), admitted=() if step_id else (admitted,)))
        tokens.append(target.collect().results[0].token_ids)
    target.close()
    return tokens


@pytest.mark.parametrize("grid", ["4", "2x2"])
def test_a_draft_that_spoils_a_round_is_left_out_by_all_stages(
    rank_pool: Pools, tmp_path: Path, grid: str
) -> None:
    size, stages = GRIDS[grid]
    model: Any = save_model(tmp_path, "llama", num_layers=NUM_LAYERS)
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
        expected = model(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 2:].argmax(-1).tolist()
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    spoilt, after = rank_pool(size).run(run_with_poison, config_of(tmp_path, size, stages=stages))[0]
    assert [*spoilt, *after] == expected


# -------------------------------------------------------------------------------------- life and death


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["2", pytest.param("2x2", marks=pytest.mark.full)])
def test_an_engine_starts_its_stages(folder_of: Folders, grid: str) -> None:
    size, stages = GRIDS[grid]
    folder = folder_of("llama")
    with Engine(config_of(folder)) as engine:
        expected = generate(engine, [GREEDY, SAMPLED])
    with Engine(config_of(folder, size, stages=stages, **drafting("draft_model", folder))) as engine:
        assert generate(engine, [GREEDY, SAMPLED]) == expected
        assert engine.metrics().num_accepted_tokens > 50


@pytest.mark.parametrize(
    ("grid", "victim"),
    [
        pytest.param("4", 2, id="stage between"),
        pytest.param("2x2", 1, id="beside the leader", marks=pytest.mark.full),
        pytest.param("2x2", 2, id="in the first stage", marks=pytest.mark.full),
    ],
)
def test_a_dead_rank_ends_the_group(
    breakable_pool: BreakablePools, folder_of: Folders, tmp_path: Path, grid: str, victim: int
) -> None:
    size, stages = GRIDS[grid]
    with breakable_pool(size) as pool:
        config = config_of(folder_of("llama"), size, stages=stages)
        failure = failure_after_a_death(pool, config, victim, tmp_path)
        assert isinstance(failure.error, TransportError)
        assert "lost a peer" in failure.text
