"""Drafting by one recorded loop against drafting step by step, with a recorder that works on a CPU."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specdec.attention.sdpa import SdpaAttention
from specdec.attention.triton import TritonPagedAttention
from specdec.core.sampling_params import SamplingParams
from specdec.kv.config import CacheConfig
from specdec.model.batch import PositionShift
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner
from specdec.proposers.draft_graph import GraphedDraftLoop
from specdec.proposers.draft_loop import ChainStart, StepwiseDraftLoop
from specdec.sampling.sampler import Sampler
from specdec.sampling.shaping import LogitShaper, shaper_for
from tests.architectures import VOCAB_SIZE, save_model
from tests.specdec.model.replaying_recorder import ReplayingRecorder
from tests.triton_interpreter import needs_interpreter

K = 3
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.9)
CUT = SamplingParams(temperature=1.1, top_k=20, top_p=0.9)
POISON = 77


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("llama")
    save_model(folder, "llama")
    model = load_model(ModelConfig(model=str(folder)))
    with torch.no_grad():
        model.model.get_input_embeddings().weight[POISON] = torch.nan
    return model


def make_runner(loaded: LoadedModel, *, triton: bool) -> ModelRunner:
    backend = (
        TritonPagedAttention(loaded.device, max_context=loaded.max_model_len) if triton else SdpaAttention()
    )
    return ModelRunner(loaded, CacheConfig(num_blocks=60, block_size=4), max_num_seqs=2, backend=backend)


def start(
    tokens: Sequence[int],
    position: int,
    first_block: int,
    budget: int,
    params: SamplingParams,
    **more: object,
) -> ChainStart:
    table = list(range(first_block, first_block + 8))
    return ChainStart(tokens, position, table, budget, params, (1 << 63) + first_block, **more)  # type: ignore[arg-type]


@needs_interpreter
def test_chains_are_those_of_the_stepwise_loop(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stepwise_runner, graph_runner = (make_runner(loaded, triton=one) for one in (False, True))
    stepwise = StepwiseDraftLoop(stepwise_runner, Sampler(), VOCAB_SIZE - 3)
    loop = GraphedDraftLoop(
        graph_runner,
        CompileConfig(),
        vocab_size=VOCAB_SIZE - 3,
        num_draft_tokens=K,
        max_num_seqs=2,
        recorder=ReplayingRecorder(monkeypatch),
    )
    assert loop.try_draft([start([5], 0, 1, 1, GREEDY)]) is None, "nothing is recorded yet"
    assert loop.warm_up() == "ready"
    assert loop.progress().done == 4
    rng = random.Random(3)
    prompts = [rng.choices(range(2, 70), k=count) for count in (9, 14)]
    for number, prompt in enumerate(prompts):  # read by forwards of the runners
        piece = [start(prompt, 0, 1 + 10 * number, 0, GREEDY)]
        assert loop.try_draft(piece) is None, "nothing to draft"
        stepwise.draft(piece)
        for ours, theirs in zip(
            (*graph_runner.pool.keys, *graph_runner.pool.values),
            (*stepwise_runner.pool.keys, *stepwise_runner.pool.values),
            strict=True,
        ):
            ours.copy_(theirs)
    batches = [
        [start([4], 9, 1, 3, WARM), start([6, 8], 14, 11, 2, GREEDY)],
        [start([4], 9, 1, 2, CUT)],
        [start([6, 8], 14, 11, 1, WARM)],
        [start([3, 4], 9, 1, 0, WARM), start([8], 14, 11, 3, CUT)],
        # More than the largest graph holds: branches of the first one, over blocks of their own.
        [start([4], 9, 1, 3, WARM), *(start([one], 0, 21 + 8 * one, 1 + one % 3, CUT) for one in range(4))],
        [start([POISON], 9, 1, 3, WARM), start([8], 14, 11, 3, WARM)],
        # Behind a gap; with positions of their own; with position ids of another variant.
        [start([4], 9 + 40, 1, 3, WARM, num_dropped=40), start([6, 8], 14, 11, 3, CUT)],
        [start([4], 9 + 80, 1, 3, WARM, num_dropped=80, shift=PositionShift(-60, sys.maxsize))],
        [start([4], 9, 1, 3, WARM, shift=PositionShift(100, 12)), start([8], 14, 11, 2, WARM)],
        [start([4], 9, 1, 3, WARM, shift=PositionShift(100, 10))],
    ]
    assert loop.try_draft([start([4], 9, 1, 3, WARM, shift=PositionShift(100, 11))]) is None
    for batch in batches:
        graph_runner.pool.keys[0][0] = float("nan")  # the scratch block never matters
        expected = stepwise.draft(batch)
        assert loop.try_draft(batch) == expected
        assert [len(chain) for chain in expected] == [
            0 if POISON in one.token_ids else one.budget for one in batch
        ]
        if any(POISON in one.token_ids for one in batch):
            continue  # the recorded loop reads on behind a chain that has ended, where nobody looks
        for ours, theirs in zip(graph_runner.pool.keys, stepwise_runner.pool.keys, strict=True):
            torch.testing.assert_close(ours[1:], theirs[1:], rtol=0, atol=3e-5, equal_nan=True)


@needs_interpreter
def test_what_it_leaves_to_the_stepwise_loop(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = GraphedDraftLoop(
        make_runner(loaded, triton=True),
        CompileConfig(),
        vocab_size=VOCAB_SIZE,
        num_draft_tokens=1,
        max_num_seqs=1,
        recorder=ReplayingRecorder(monkeypatch),
    )
    assert loop.warm_up() == "ready"
    assert loop.try_draft([start([5], 0, 1, 1, GREEDY)]) is not None
    params = SamplingParams(temperature=0.0, presence_penalty=1.0)
    shaper = shaper_for(params, eos_token_ids=(), num_prompt_tokens=1)
    assert isinstance(shaper, LogitShaper)
    for refused in (
        [start([5, 6, 7], 0, 1, 1, GREEDY)],
        [start([5], 0, 1, 2, GREEDY)],
        [start([5], 0, 1, 1, GREEDY), start([5, 6, 7], 0, 11, 1, GREEDY)],
        [start([5], 0, 1, 1, SamplingParams(temperature=1.0, top_k=1000))],
        [start([5], 0, 1, 1, params, shaper=shaper)],
        [start([5], 0, 1, 1, GREEDY, constraint=object())],
    ):
        assert loop.try_draft(refused) is None


def test_off_without_the_triton_attention(loaded: LoadedModel) -> None:
    runner = make_runner(loaded, triton=False)
    loop = GraphedDraftLoop(
        runner, CompileConfig(), vocab_size=VOCAB_SIZE, num_draft_tokens=K, max_num_seqs=4
    )
    assert loop.state == "off"
    assert loop.try_draft([start([5], 0, 1, 1, GREEDY)]) is None
