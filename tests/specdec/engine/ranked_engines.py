"""Engines over ranks that tests run in a `RankPool`, and the comparison of their tokens with one process's.

All-reduce adds in another order, and a batch in parts has other shapes, so a stream may leave the reference
where that one itself hesitates: a divergence is excused only if the gap between the two best values of
log p + g is below four times the measured difference of the logits. Excused ones are counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from specdec.core.outputs import TokenLogprobs
from specdec.core.sampling_params import Grammar, LogprobsMode, SamplingParams
from specdec.engine.build import kv_budgets_of
from specdec.engine.build_target import build_target, build_target_part
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.offline import choice_requests
from specdec.engine.ranks.follower import follow
from specdec.engine.ranks.leader import LeadingTarget
from specdec.engine.text.tokenizer import build_tokenizer
from specdec.kv.config import CacheConfig
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.parallel.group import RankGroup
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.registry import create_proposer
from specdec.proposers.target_facts import TargetFacts
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import noisy_scores
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from tests.architectures import save_model
from tests.rank_pool import Failure, RankPool
from tests.specdec.engine.tree_drafters import Bushy

NUM_TOKENS = 12
PROMPTS = [[(7 * index + 3 * step) % 100 + 2 for step in range(3 + 8 * index)] for index in range(4)]
REPETITIVE = [[5, 9, 23, 5, 9, 23, 5, 9], [40] * 6]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.9, top_k=50, top_p=0.95, max_tokens=NUM_TOKENS, ignore_eos=True, seed=7
)
PLAIN = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=11)
SHAPED = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    logit_bias=((5, 2.0), (120, 1.5), (64, -3.0)),
    bad_words=((5, 5), (9,), (120, 64)),
    min_tokens=6,
    stop_token_ids=(0,),
    max_tokens=NUM_TOKENS,
    ignore_eos=True,
    seed=13,
)
SHAPED_GREEDY = SamplingParams(
    temperature=0.0, repetition_penalty=1.5, allowed_token_ids=tuple(range(1, 128, 3)), max_tokens=NUM_TOKENS
)
CONSTRAINED = SamplingParams(
    grammar=Grammar("regex", "([a-z]{1,5}[0-9] ){40}"), temperature=1.2, max_tokens=NUM_TOKENS, seed=17
)
CONSTRAINED_GREEDY = SamplingParams(
    grammar=Grammar("regex", "[^e]{200}"), temperature=0.0, repetition_penalty=1.1, max_tokens=NUM_TOKENS
)
RANKS_BY_ARCHITECTURE = {
    "llama": 4,
    "llama_tied": 2,
    "qwen2": 2,
    "qwen3": 2,
    "mistral": 4,
    "gpt_neox": 2,
    "gpt2": 4,
    "phi3": 2,
    "phi3_longrope": 2,
    "llama_dynamic_ntk": 2,
    "gemma2": 4,
    "gemma3": 2,
    "gemma3_with_images": 2,
    "starcoder2": 2,
    "mixtral": 2,
    "qwen2_moe": 2,
    "olmo2": 4,
    "granite": 2,
    "cohere2": 2,
    "qwen3_moe": 2,
    "falcon": 4,
    "falcon_multi_query": 2,
    "falcon_multi_head": 2,
}
"""Every architecture with one number of ranks; the long run takes both."""


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks-{architecture}")
        save_model(folder, architecture)
        return folder

    return make


class Served(NamedTuple):
    """What an engine has done."""

    streams: list[list[int]]
    num_accepted: int
    num_preemptions: int
    num_moved_kv: int
    num_rows_beside: int


def config_of(
    folder: Path, size: int = 1, *, stages: int = 1, num_blocks: int = 60, **speculative: Any
) -> EngineConfig:
    """A target over `size` ranks, of which `stages` equal parts hold a share of the layers each."""
    return EngineConfig(
        target=ModelConfig(
            model=str(folder),
            dtype="float32",
            tensor_parallel_size=size // stages,
            pipeline_parallel_size=stages,
            pipeline_micro_batch_tokens=6,
            compile=CompileConfig(mode="off"),
        ),
        speculative_config=SpeculativeConfig.model_validate(
            {"method": "none", "controller": "fixed", **speculative}
        ),
        cache=CacheConfig(block_size=4, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24),
    )


def drafting(method: str, folder: Path) -> dict[str, Any]:
    """The `speculative_config` of a method; a draft model is the target itself, and the name of a policy may
    follow that of method self, the exit layer that of layerskip.
    """
    method, _, policy = method.partition(" ")
    more: dict[str, dict[str, Any]] = {
        "ngram": {"prompt_lookup_min": 1},
        "draft_model": {"model": str(folder), "cache": {"num_blocks": 60, "block_size": 4}},
        "lookahead": {"lookahead": {"window_size": 2, "ngram_size": 3}},
        "layerskip": {"exit_layer": int(policy) if policy.isdecimal() else 1},
        "self": {"kv": {"policy": policy or "streaming", "budget": 16, "sink_tokens": 4}},
    }
    return {"method": method, **more.get(method, {})}


def generate(engine: Engine, params: Sequence[SamplingParams]) -> list[list[int]]:
    return [
        list(result.token_ids) for one in params for result in engine.generate([*PROMPTS, *REPETITIVE], one)
    ]


def leading_engine(group: RankGroup, config: EngineConfig, *, has_trees: bool = False) -> Engine:
    """Rank 0's engine over a target of all ranks; the drafter is its own, its chains perhaps in trees."""
    target = LeadingTarget(build_target_part(config, group), group)
    speculative = config.speculative_config
    facts = TargetFacts(
        vocab_size=target.description.vocab_size,
        dtype="float32",
        max_num_seqs=6,
        model=config.target.model,
    )
    proposer = create_proposer(speculative, facts)
    return Engine.from_parts(
        target=target,
        proposer=Bushy(proposer, vocab_size=facts.vocab_size) if has_trees else proposer,
        tokenizer=build_tokenizer(config),
        scheduler=config.scheduler,
        controller=FixedController(0 if speculative.method == "none" else 8 if has_trees else 3),
        kv_budgets=kv_budgets_of(speculative),
    )


def lead(
    group: RankGroup, config: EngineConfig, use: Callable[[Engine], Any], *, has_trees: bool = False
) -> Any:
    """Rank 0: what `use` makes of an engine over all ranks; the others follow."""
    if group.rank > 0:
        follow("target", config, group)
        return None
    with leading_engine(group, config, has_trees=has_trees) as engine:
        return use(engine)


def serve(
    group: RankGroup, config: EngineConfig, params: Sequence[SamplingParams], has_trees: bool = False
) -> Any:
    """Rank 0: `Served`; the others follow."""
    return lead(group, config, lambda engine: served(engine, params), has_trees=has_trees)


def served(engine: Engine, params: Sequence[SamplingParams]) -> Served:
    streams = generate(engine, params)
    metrics = engine.metrics()
    return Served(
        streams,
        metrics.num_accepted_tokens,
        metrics.num_preemptions,
        metrics.num_moved_kv,
        metrics.num_rows_beside,
    )


def logprobs_of_stream(engine: Engine, mode: LogprobsMode = "raw") -> list[TokenLogprobs]:
    params = SamplingParams(
        temperature=0.8, max_tokens=6, logprobs=4, logprobs_mode=mode, seed=5, ignore_eos=True
    )
    (request,) = choice_requests(PROMPTS[2], params, "one")
    engine.add_request(request)
    found: list[TokenLogprobs] = []
    while engine.has_work:
        for output in engine.step():
            found += output.logprobs or ()
    return found


def serve_logprobs(group: RankGroup, config: EngineConfig, mode: LogprobsMode = "raw") -> Any:
    return lead(group, config, lambda engine: logprobs_of_stream(engine, mode))


def assert_same_logprobs(ours: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    assert len(ours) == len(expected) == 6
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.token_id == theirs.token_id
        assert [token_id for token_id, _ in mine.top] == [token_id for token_id, _ in theirs.top]
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def serve_until_a_rank_dies(group: RankGroup, config: EngineConfig, has_begun: Path) -> Any:
    """Rank 0: make the file `has_begun` and serve on. The others end with their process, as in life."""
    if group.rank > 0:
        try:
            follow("target", config, group)
        finally:
            os._exit(1)

    def forever(engine: Engine) -> None:
        while True:
            engine.generate(PROMPTS, GREEDY)
            has_begun.touch()

    return lead(group, config, forever)


def failure_after_a_death(pool: RankPool, config: EngineConfig, victim: int, folder: Path) -> Failure:
    """Return what rank 0 raises when another rank dies while it serves."""
    has_begun = folder / "has-begun"
    pool.send(serve_until_a_rank_dies, config, has_begun)
    until = time.monotonic() + 120
    while not has_begun.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    pool.kill(victim)
    failure = pool.receive(0)
    assert isinstance(failure, Failure)
    return failure


def last_logits(group: RankGroup | None, config: EngineConfig, token_ids: list[int]) -> torch.Tensor:
    """Logits [0 or 1, columns] behind a prefix: of one process, or this rank's share."""
    target = build_target(config) if group is None else build_target_part(config, group)
    piece = SequenceSlice(token_ids=token_ids, start=0, block_table=range(1, 60), num_logit_rows=1)
    return target.runner.forward([piece]).clone()


def is_excused(
    pool: RankPool, folder: Path, prefix: list[int], params: SamplingParams, stages: int = 1
) -> bool:
    """Whether one process's logits behind `prefix` are closer than four times the ranks' difference."""
    single = last_logits(None, config_of(folder), prefix)
    config = config_of(folder, pool.size, stages=stages)
    parts = pool.run(last_logits, config, prefix)[: config.target.tensor_parallel_size]
    rows = SamplingRows.build([RowSpec(params, params.seed or 0, len(prefix), 1)])
    best, second = noisy_scores(single, rows)[0].topk(2).values.tolist()
    difference = float((single - torch.cat(parts, -1)).abs().max()) / (params.temperature or 1.0)
    return bool(best - second < 4 * difference)


def check(
    pool: RankPool,
    folder: Path,
    params: Sequence[SamplingParams],
    *,
    method: str = "none",
    stages: int = 1,
    num_blocks: int = 60,
    max_excused: int = 1,
    has_trees: bool = False,
) -> Served:
    """Compare the streams of a target over the pool's ranks with those of one process without drafts."""
    with Engine(config_of(folder)) as engine:
        expected = generate(engine, params)
    config = config_of(folder, pool.size, stages=stages, num_blocks=num_blocks, **drafting(method, folder))
    answer: Served = pool.run(serve, config, params, has_trees)[0]
    prompts = [prompt for _ in params for prompt in (*PROMPTS, *REPETITIVE)]
    kinds = [one for one in params for _ in (*PROMPTS, *REPETITIVE)]
    num_excused = 0
    for ours, theirs, prompt, kind in zip(answer.streams, expected, prompts, kinds, strict=True):
        assert len(ours) == len(theirs) == NUM_TOKENS
        if ours != theirs:
            same = next(index for index in range(NUM_TOKENS) if ours[index] != theirs[index])
            assert is_excused(pool, folder, [*prompt, *theirs[:same]], kind, stages), (ours, theirs)
            num_excused += 1
    assert num_excused <= max_excused
    return answer
