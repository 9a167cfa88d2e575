"""A target over several ranks gives the tokens that one process gives, whatever drafts for it.

All-reduce adds in another order, so a stream may leave the reference where that one itself hesitates: a
divergence is excused only if the gap between the two best values of log p + g is below four times the
measured difference of the logits. Excused ones are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.core.errors import ResourceError, TransportError
from specdec.core.sampling_params import Grammar, SamplingParams
from specdec.engine.build import build_target_part, build_tokenizer
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.offline import choice_requests
from specdec.engine.rank_follower import follow
from specdec.engine.rank_launch import rank_devices
from specdec.engine.rank_leader import LeadingTarget
from specdec.kv.config import CacheConfig
from specdec.model import pool_sizing
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.loader import load_model
from specdec.model.parallel.group import RankGroup
from specdec.model.runner import ModelRunner
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.registry import create_proposer
from specdec.proposers.target_facts import TargetFacts
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import noisy_scores
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from tests.architectures import ARCHITECTURES, save_model
from tests.rank_pool import Failure, RankPool
from tests.specdec.engine.grammar_models import save_byte_level_model

Pools = Callable[[int], RankPool]

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

COVER = {
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


def config_of(folder: Path, size: int = 1, **speculative: Any) -> EngineConfig:
    return EngineConfig(
        target=ModelConfig(
            model=str(folder), dtype="float32", tensor_parallel_size=size, compile=CompileConfig(mode="off")
        ),
        speculative_config=SpeculativeConfig.model_validate({"method": "none", **speculative}),
        cache=CacheConfig(block_size=4, num_blocks=60),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24),
    )


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks-{architecture}")
        save_model(folder, architecture)
        return folder

    return make


def generate(engine: Engine, params: Sequence[SamplingParams]) -> list[list[int]]:
    return [
        list(result.token_ids) for one in params for result in engine.generate([*PROMPTS, *REPETITIVE], one)
    ]


def leading_engine(group: RankGroup, config: EngineConfig) -> Engine:
    """Rank 0's engine over a target of all ranks; the drafter is its own."""
    target = LeadingTarget(build_target_part(config, group), group)
    speculative = config.speculative_config
    facts = TargetFacts(
        vocab_size=target.description.vocab_size,
        dtype="float32",
        max_num_seqs=6,
        model=config.target.model,
    )
    return Engine.from_parts(
        target=target,
        proposer=create_proposer(speculative, facts),
        tokenizer=build_tokenizer(config),
        scheduler=config.scheduler,
        controller=FixedController(0 if speculative.method == "none" else 3),
    )


def serve(group: RankGroup, config: EngineConfig, params: Sequence[SamplingParams]) -> Any:
    """Rank 0: streams and how many draft tokens were accepted; the others follow."""
    if group.rank > 0:
        follow("target", config, group)
        return None
    with leading_engine(group, config) as engine:
        return generate(engine, params), engine.metrics().num_accepted_tokens


def last_logits(group: RankGroup | None, config: EngineConfig, token_ids: list[int]) -> torch.Tensor:
    """Logits behind a prefix: of one process, or this rank's share."""
    loaded = load_model(config.target, None, group)
    runner = ModelRunner(loaded, CacheConfig(block_size=4, num_blocks=60), max_num_seqs=1)
    table = list(range(1, 60))
    piece = SequenceSlice(token_ids=token_ids, start=0, block_table=table, num_logit_rows=1)
    return runner.forward([piece])[0].clone()


def is_excused(pool: RankPool, folder: Path, prefix: list[int], params: SamplingParams) -> bool:
    single = last_logits(None, config_of(folder), prefix)
    parted = torch.cat(pool.run(last_logits, config_of(folder, pool.size), prefix))
    rows = SamplingRows.build([RowSpec(params, params.seed or 0, len(prefix), 1)])
    best, second = noisy_scores(single[None], rows)[0].topk(2).values.tolist()
    difference = float((single - parted).abs().max()) / (params.temperature or 1.0)
    return bool(best - second < 4 * difference)


def check(
    pool: RankPool, folder: Path, params: Sequence[SamplingParams], **speculative: Any
) -> tuple[int, int]:
    """Return the number of accepted draft tokens and of excused divergences."""
    with Engine(config_of(folder)) as engine:
        expected = generate(engine, params)
    streams, num_accepted = pool.run(serve, config_of(folder, pool.size, **speculative), params)[0]
    prompts = [prompt for _ in params for prompt in (*PROMPTS, *REPETITIVE)]
    kinds = [one for one in params for _ in (*PROMPTS, *REPETITIVE)]
    num_excused = 0
    for ours, theirs, prompt, kind in zip(streams, expected, prompts, kinds, strict=True):
        assert len(ours) == len(theirs) == NUM_TOKENS
        if ours != theirs:
            same = next(index for index in range(NUM_TOKENS) if ours[index] != theirs[index])
            assert is_excused(pool, folder, [*prompt, *theirs[:same]], kind), (ours, theirs)
            num_excused += 1
    assert num_excused <= 1
    return num_accepted, num_excused


@pytest.mark.parametrize("architecture", COVER)
def test_same_tokens_over_ranks(
    rank_pool: Pools, folder_of: Callable[[str], Path], architecture: str
) -> None:
    pool = rank_pool(COVER[architecture])
    accepted, _ = check(pool, folder_of(architecture), [GREEDY, PLAIN], method="ngram", prompt_lookup_min=1)
    assert accepted > 0


def serve_twice(group: RankGroup, config: EngineConfig, params: SamplingParams) -> Any:
    """Rank 0: streams of two waves of the same prompts, and how many tokens the second found in the cache."""
    if group.rank > 0:
        follow("target", config, group)
        return None
    with leading_engine(group, config) as engine:
        waves = [generate(engine, [params]) for _ in range(2)]
        return waves, engine.metrics().prefix_cache_hits


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


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "olmo2"])
def test_same_tokens_with_a_draft_model_of_one_rank(
    rank_pool: Pools, folder_of: Callable[[str], Path], architecture: str
) -> None:
    folder = folder_of(architecture)
    draft = {"method": "draft_model", "model": str(folder), "cache": {"num_blocks": 60, "block_size": 4}}
    accepted, _ = check(rank_pool(2), folder, [GREEDY, SAMPLED], **draft)
    assert accepted > 50, "the model drafting for itself"


@pytest.mark.parametrize(
    ("size", "method"), [(2, "draft_model"), (4, "ngram")], ids=["2-draft_model", "4-ngram"]
)
def test_same_tokens_with_shaped_logits(
    rank_pool: Pools, folder_of: Callable[[str], Path], size: int, method: str
) -> None:
    """Each rank changes the columns that it has."""
    folder = folder_of("llama")
    speculative: dict[str, Any] = {"method": method}
    if method == "draft_model":
        speculative |= {"model": str(folder), "cache": {"num_blocks": 60, "block_size": 4}}
    accepted, num_excused = check(rank_pool(size), folder, [SHAPED, SHAPED_GREEDY], **speculative)
    assert num_excused == 0
    assert accepted > (50 if method == "draft_model" else 0)


@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
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
    assert ours == expected


@pytest.mark.parametrize(
    ("size", "method"), [(2, "draft_model"), (4, "ngram")], ids=["2-draft_model", "4-ngram"]
)
def test_same_tokens_with_a_grammar(rank_pool: Pools, tmp_path: Path, size: int, method: str) -> None:
    """Each rank masks the columns that it has."""
    pytest.importorskip("llguidance")
    save_byte_level_model(tmp_path)
    speculative: dict[str, Any] = {"method": method}
    if method == "draft_model":
        speculative |= {"model": str(tmp_path), "cache": {"num_blocks": 60, "block_size": 4}}
    accepted, num_excused = check(rank_pool(size), tmp_path, [CONSTRAINED, CONSTRAINED_GREEDY], **speculative)
    assert num_excused == 0
    assert accepted > (50 if method == "draft_model" else 0)


@pytest.mark.full
@pytest.mark.parametrize("architecture", COVER)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_same_tokens_over_ranks_in_every_setting(
    rank_pool: Pools, folder_of: Callable[[str], Path], architecture: str, size: int, method: str
) -> None:
    folder = folder_of(architecture)
    speculative: dict[str, Any] = {"method": method}
    if method == "draft_model":
        speculative |= {"model": str(folder), "cache": {"num_blocks": 60, "block_size": 4}}
    check(rank_pool(size), folder, [GREEDY, PLAIN, SAMPLED], **speculative)


def test_logprobs_over_ranks(rank_pool: Pools, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("qwen3")
    with Engine(config_of(folder)) as engine:
        expected = logprobs_of_stream(engine)
    ours = rank_pool(2).run(serve_logprobs, config_of(folder, 2))[0]
    assert len(ours) == len(expected) == 6
    for mine, theirs in zip(ours, expected, strict=True):
        assert mine.token_id == theirs.token_id
        assert [token_id for token_id, _ in mine.top] == [token_id for token_id, _ in theirs.top]
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def logprobs_of_stream(engine: Engine) -> list[Any]:
    params = SamplingParams(temperature=0.8, max_tokens=6, logprobs=4, seed=5, ignore_eos=True)
    (request,) = choice_requests(PROMPTS[2], params, "one")
    engine.add_request(request)
    found: list[Any] = []
    while engine.has_work:
        for output in engine.step():
            found += output.logprobs or ()
    return found


def serve_logprobs(group: RankGroup, config: EngineConfig) -> Any:
    if group.rank > 0:
        follow("target", config, group)
        return None
    with leading_engine(group, config) as engine:
        return logprobs_of_stream(engine)


def test_a_clear_choice_is_not_excused(rank_pool: Pools, folder_of: Callable[[str], Path]) -> None:
    assert not is_excused(rank_pool(2), folder_of("llama"), PROMPTS[1], GREEDY)
    assert not is_excused(rank_pool(2), folder_of("llama"), PROMPTS[1], PLAIN)


# ------------------------------------------------------------------------- ranks started by the engine


@pytest.mark.slow
@pytest.mark.parametrize(("target_size", "draft_size"), [(2, 1), (1, 2), (2, 2)])
def test_an_engine_starts_its_ranks(
    folder_of: Callable[[str], Path], target_size: int, draft_size: int
) -> None:
    folder = folder_of("llama")
    draft = {
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


def serve_until_a_rank_dies(group: RankGroup, config: EngineConfig) -> Any:
    if group.rank > 0:
        follow("target", config, group)
        return None
    with leading_engine(group, config) as engine:
        while True:
            engine.generate(PROMPTS, GREEDY)


def test_a_dead_rank_ends_the_group(folder_of: Callable[[str], Path]) -> None:
    with RankPool(2) as pool:
        pool.send(serve_until_a_rank_dies, config_of(folder_of("llama"), 2))
        pool.kill(1)
        failure = pool.receive(0)
        assert isinstance(failure, Failure)
        assert isinstance(failure.error, TransportError)
        assert "lost a peer" in failure.text


def test_devices_of_ranks() -> None:
    assert rank_devices("cpu", 3) == [torch.device("cpu")] * 3
    if not torch.cuda.is_available():
        assert rank_devices("auto", 2) == [torch.device("cpu")] * 2


def test_every_architecture_is_covered() -> None:
    """But for those that differ from another one in what is not cut."""
    assert set(ARCHITECTURES) - set(COVER) == {"llama3_rope"}
    assert set(COVER) <= set(ARCHITECTURES)
