"""The prefix cache under real (tiny, random) models: streams are those without it, in fp32 and in bf16.

In bf16 that holds only where a row's numbers do not depend on its company, which is what the compiled forward
is for; eager kernels of different shapes differ in the last bits, with the cache as without.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.text.tokenizer import HuggingFaceTokenizer
from specdec.kv.config import CacheConfig
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_loop import NativeDraftLoop
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.sampling.sampler import Sampler
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from tests.architectures import VOCAB_SIZE, make_tokenizer, save_model

pytestmark = pytest.mark.usefixtures("one_thread")
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=16, seed=3, ignore_eos=True),
]
Load = Callable[[str, str], LoadedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    @cache
    def folder(architecture: str) -> Path:
        made = tmp_path_factory.mktemp(architecture)
        save_model(made, architecture)
        return made

    @cache
    def loaded(architecture: str, dtype: str) -> LoadedModel:
        return load_model(ModelConfig.model_validate({"model": str(folder(architecture)), "dtype": dtype}))

    return loaded


def make_runner(loaded: LoadedModel, num_blocks: int, *, compiled: bool) -> ModelRunner:
    runner = ModelRunner(loaded, CacheConfig(block_size=4, num_blocks=num_blocks), max_num_seqs=8)
    if compiled:
        runner.graphs = forward = CompiledForward(runner, CompileConfig())
        if forward.warm_up() != "ready":
            pytest.skip("no compiled forward here")
    return runner


def make_engine(loaded: LoadedModel, num_blocks: int, *, compiled: bool, prefix_caching: bool) -> Engine:
    """The model drafts for itself, with a pool of its own of the same size."""
    sampler = Sampler()
    if compiled:
        sampler.warm_up()
    drafting = make_runner(loaded, num_blocks, compiled=compiled)
    proposer = DraftModelProposer(
        drafting,
        DraftChoice(sampler=sampler, vocab_size=VOCAB_SIZE),
        reading=DraftReading(max_read_tokens=24, prefix_caching=prefix_caching),
        fused_loop=NativeDraftLoop(drafting, sampler, VOCAB_SIZE) if compiled else None,
    )
    return Engine.from_parts(
        target=LocalTarget(make_runner(loaded, num_blocks, compiled=compiled), sampler),
        proposer=proposer,
        tokenizer=HuggingFaceTokenizer(make_tokenizer()),
        scheduler=SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=20),
        controller=FixedController(3),
        prefix_caching=prefix_caching,
    )


def prompts() -> list[tuple[int, ...]]:
    """Ten prompts over two beginnings; lengths end in, at and behind the borders of blocks."""
    generator = random.Random(5)
    stems = [generator.choices(range(2, VOCAB_SIZE), k=30) for _ in range(2)]
    return [
        (*stems[number % 2][: 16 + number], *generator.choices(range(2, VOCAB_SIZE), k=1 + number % 5))
        for number in range(10)
    ]


def streams(engine: Engine) -> list[tuple[int, ...]]:
    """Two waves: the second finds what the first has left."""
    with engine:
        tokens = [
            result.token_ids
            for params in PARAMS
            for _ in range(2)
            for result in engine.generate(prompts(), params)
        ]
        engine.check_integrity()
        assert engine.metrics().num_accepted_tokens > 0
    return tokens


def test_what_forbids_every_token_leaves_the_prompt_where_it_is(load: Load) -> None:
    impossible = SamplingParams(allowed_token_ids=(5,), bad_words=((5,),), max_tokens=4, seed=1)
    prompt = prompts()[0]
    assert len(prompt) == 17
    with make_engine(load("llama", "float32"), 200, compiled=False, prefix_caching=True) as engine:
        for params, num_found in ((PARAMS[0], 0), (impossible, 16), (PARAMS[0], 16)):
            (choice,) = engine.generate([prompt], params)[0].choices
            assert choice.stats.num_cached_prompt_tokens == num_found
            assert (choice.finish_reason == "error") == (params is impossible)
            assert choice.error is None or "forbids every token" in choice.error
            engine.check_integrity()


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("architecture", "dtype", "compiled"),
    [
        ("llama", "float32", False),
        ("mistral", "float32", True),  # a sliding window of 8 tokens: two blocks
        ("gemma2", "float32", False),  # windows in every other layer
        ("qwen3", "float32", True),
        ("llama", "bfloat16", True),
        ("mistral", "bfloat16", True),
        ("gpt_neox", "bfloat16", True),
    ],
)
@pytest.mark.parametrize("num_blocks", [29, 200], ids=["preempting", "roomy"])
def test_streams_are_those_without_the_cache(
    load: Load, architecture: str, dtype: str, compiled: bool, num_blocks: int
) -> None:
    loaded = load(architecture, dtype)
    cached = make_engine(loaded, num_blocks, compiled=compiled, prefix_caching=True)
    plain = make_engine(loaded, num_blocks, compiled=compiled, prefix_caching=False)
    assert streams(cached) == streams(plain)
    metrics = cached.metrics()
    assert metrics.prefix_cache_hits > 0.4 * metrics.prefix_cache_queries
    if num_blocks == 29:
        assert metrics.num_preemptions > 0


def test_k_and_v_of_another_forward_are_not_used(load: Load) -> None:
    """What the eager forward has cached is dropped once the compiled one answers."""
    runner = make_runner(load("llama", "bfloat16"), 200, compiled=False)
    sampler = Sampler()
    engine = Engine.from_parts(
        target=LocalTarget(runner, sampler),
        proposer=DraftModelProposer(runner, DraftChoice(sampler=sampler, vocab_size=VOCAB_SIZE)),
        tokenizer=HuggingFaceTokenizer(make_tokenizer()),
        controller=FixedController(0),
    )
    with engine:
        prompt = prompts()[9]
        engine.generate([prompt], PARAMS[0])
        runner.graphs = forward = CompiledForward(runner, CompileConfig())
        if forward.warm_up() != "ready":
            pytest.skip("no compiled forward here")
        engine.generate([(5,)], PARAMS[0])
        before = engine.metrics().prefix_cache_hits
        engine.generate([prompt], PARAMS[0])
        assert engine.metrics().prefix_cache_hits == before
        engine.generate([prompt], PARAMS[0])
        assert engine.metrics().prefix_cache_hits > before


def read(
    runner: ModelRunner, tokens: list[int], blocks: range, chunks: list[int], company: list[SequenceSlice]
) -> torch.Tensor:
    """Read tokens in chunks beside other sequences; return the logits of the last row, as the model's own."""
    start = 0
    for length in chunks:
        piece = SequenceSlice(
            token_ids=tokens[start : start + length],
            start=start,
            block_table=blocks,
            num_logit_rows=1,
        )
        logits = runner.forward([*company, piece])[-1]
        start += length
    return logits.clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt2"])
def test_logits_from_cached_blocks_are_bitwise_those_of_recomputation(
    load: Load, architecture: str, dtype: str
) -> None:
    """Whoever computed the blocks: in one go or token by token, alone or beside others of any shape."""
    runner = make_runner(load(architecture, dtype), 100, compiled=True)
    generator = random.Random(1)
    tokens = generator.choices(range(2, VOCAB_SIZE), k=47)
    company = [
        SequenceSlice(
            token_ids=generator.choices(range(2, VOCAB_SIZE), k=length),
            start=0,
            block_table=range(first, first + 5),
            num_logit_rows=rows,
        )
        for first, length, rows in ((60, 3, 3), (65, 17, 1), (70, 1, 1))
    ]
    alone = read(runner, tokens, range(1, 13), [47], [])
    for number, (chunks, beside) in enumerate(
        [([40], company), ([1] * 40, []), ([13, 1, 20, 2, 4], company[:1]), ([39, 1], company[1:])]
    ):
        # Forty tokens are cached by a sequence that goes on otherwise; ten blocks of four are lent.
        held = range(15 + 11 * number, 15 + 11 * number + 10)
        read(runner, tokens[:40], held, chunks, beside)
        table = [*held, 13, 14]
        rest = SequenceSlice(token_ids=tokens[40:], start=40, block_table=table, num_logit_rows=1)
        for around in ([], company):
            assert torch.equal(runner.forward([*around, rest])[-1], alone)
        table[9] = 70  # the negative control: one block of somebody else's
        wrong = SequenceSlice(token_ids=tokens[40:], start=40, block_table=table, num_logit_rows=1)
        assert not torch.equal(runner.forward([wrong])[-1], alone)
