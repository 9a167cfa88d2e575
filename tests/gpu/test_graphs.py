"""CUDA graphs against the eager forward, of a tiny model on a real device."""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.attention.triton import TritonPagedAttention
from specdec.core.sampling_params import SamplingParams
from specdec.kv.config import CacheConfig
from specdec.model.acceleration import attention_of
from specdec.model.batch import PositionShift, SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.cuda_graphs import CudaForward
from specdec.model.fused_norms import fuse_norms
from specdec.model.fused_rotary import fuse_rotary
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner
from specdec.proposers.draft_graph import GraphedDraftLoop
from specdec.proposers.draft_loop import ChainStart, StepwiseDraftLoop
from specdec.sampling.sampler import Sampler
from tests.architectures import VOCAB_SIZE, make_model, save_model

pytestmark = pytest.mark.gpu

NUM_BLOCKS = 200
ARCHITECTURES = ("llama", "gemma2", "mistral", "qwen3", "gpt2", "gpt_neox", "phi3", "falcon", "olmo2")
ROTATING = ("llama", "gemma2", "gemma3", "mistral", "qwen2", "qwen3", "phi3", "falcon", "olmo2", "llama_yarn")


def load(folder: Path, architecture: str) -> LoadedModel:
    save_model(folder, architecture)
    return load_model(ModelConfig(model=str(folder), device="cuda", dtype="float32"))


def make_runner(loaded: LoadedModel) -> ModelRunner:
    cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=4)
    runner = ModelRunner(
        loaded, cache, max_num_seqs=8, backend=attention_of(loaded, "triton", CompileConfig())
    )
    assert isinstance(runner.backend, TritonPagedAttention)
    return runner


def random_batch(rng: random.Random, max_rows: int) -> list[SequenceSlice]:
    free = list(range(1, NUM_BLOCKS))
    rng.shuffle(free)
    slices: list[SequenceSlice] = []
    while max_rows > 0 and len(slices) < 6:
        rows, start = rng.randint(1, min(max_rows, 9)), rng.randint(0, 90)
        max_rows -= rows
        table = [free.pop() for _ in range(-(-(start + rows) // 4))]
        token_ids = rng.choices(range(VOCAB_SIZE), k=rows)
        slices.append(
            SequenceSlice(
                token_ids=token_ids,
                start=start,
                block_table=table,
                num_logit_rows=rng.randint(0, rows),
                num_dropped=4 * rng.choice((0, 0, rng.randint(1, 30))),
            )
        )
    return slices


def fill(runner: ModelRunner, seed: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    for pool in (*runner.pool.keys, *runner.pool.values):
        pool[1:] = torch.randn(pool[1:].shape, generator=generator, device="cuda")


def with_trees(rng: random.Random, slices: list[SequenceSlice]) -> list[SequenceSlice]:
    """About half of the sequences as trees."""
    return [
        replace(piece, parents=tuple(rng.randrange(-1, row) for row in range(len(piece.token_ids))))
        if piece.start > 0 and rng.random() < 0.5
        else piece
        for piece in slices
    ]


@pytest.mark.parametrize("takes_trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_replays_are_the_eager_forward(tmp_path: Path, architecture: str, takes_trees: bool) -> None:
    loaded = load(tmp_path, architecture)
    eager, graphed = make_runner(loaded), make_runner(loaded)
    config = CompileConfig(cuda_graph_max_rows=24)
    graphed.graphs = forward = CudaForward(graphed, config, takes_trees=takes_trees)
    assert forward.warm_up() == "ready"
    rng = random.Random(5)
    for number in range(40):
        slices = random_batch(rng, rng.choice((1, 2, 5, 12, 24)))
        slices = with_trees(rng, slices) if takes_trees else slices
        fill(eager, number)
        fill(graphed, number)
        expected = eager.forward(slices)
        assert forward.try_run(graphed.pack(slices)) is not None
        torch.testing.assert_close(graphed.forward(slices), expected, rtol=0, atol=1e-4)
        for ours, theirs in zip(graphed.pool.keys, eager.pool.keys, strict=True):
            torch.testing.assert_close(ours[1:], theirs[1:], rtol=0, atol=1e-4)


def _seen(logits: torch.Tensor) -> None:
    assert logits.sum().item() != 0


def _found_out_by_cuda(logits: torch.Tensor) -> None:
    torch.cuda.current_stream(logits.device).synchronize()


@pytest.mark.parametrize("wait", [_seen, _found_out_by_cuda])
def test_what_waits_for_the_device_stays_eager_and_works(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wait: Callable[[torch.Tensor], None],
) -> None:
    loaded = load(tmp_path, "llama")
    runner, other = make_runner(loaded), make_runner(loaded)
    piece = SequenceSlice(token_ids=[3, 4, 5], start=0, block_table=[7], num_logit_rows=3)
    expected = runner.forward([piece]).clone()
    other.graphs = recorded = CudaForward(other, CompileConfig(cuda_graph_max_rows=4))
    assert recorded.warm_up() == "ready"
    own, stream = runner.call_model, torch.cuda.current_stream()

    def waits(*args: torch.Tensor) -> torch.Tensor:
        logits = own(*args)
        wait(logits)
        return logits

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(runner, "call_model", waits)
        forward = runner.graphs = CudaForward(runner, CompileConfig(cuda_graph_max_rows=4))
        assert forward.warm_up() == "failed"
    assert "runs eagerly, which is slower" in caplog.text
    assert "from here on" not in caplog.text, "what the recording left behind could not be undone"
    assert torch.equal(runner.forward([piece]), expected)
    # Nor is anything else the worse for it.
    assert torch.cuda.current_stream() == stream
    assert torch.randn(3, device="cuda").isfinite().all()
    torch.cuda.empty_cache()
    torch.testing.assert_close(other.forward([piece]), expected, rtol=0, atol=1e-4)
    again = CudaForward(make_runner(loaded), CompileConfig(cuda_graph_max_rows=4))
    assert again.warm_up() == "ready"


def test_draft_loops_draft_what_steps_draft(tmp_path: Path) -> None:
    loaded = load(tmp_path, "llama")
    stepwise_runner, runner = make_runner(loaded), make_runner(loaded)
    stepwise = StepwiseDraftLoop(stepwise_runner, Sampler(), VOCAB_SIZE)
    loop = GraphedDraftLoop(
        runner, CompileConfig(), vocab_size=VOCAB_SIZE, num_draft_tokens=5, max_num_seqs=6
    )
    assert loop.warm_up() == "ready"
    rng = random.Random(9)
    cuts = SamplingParams(temperature=1.1, top_k=20, top_p=0.9, min_p=0.01)
    for number in range(30):
        fill(stepwise_runner, number)
        fill(runner, number)
        params = rng.choice((SamplingParams(temperature=0.0), SamplingParams(temperature=0.9), cuts))
        gap = 4 * rng.choice((0, 0, rng.randint(1, 30)))
        starts = [
            ChainStart(
                token_ids=rng.choices(range(VOCAB_SIZE), k=rng.randint(1, 2)),
                start=rng.randint(1, 80) + gap,
                num_dropped=gap,
                shift=rng.choice((None, PositionShift(-gap // 2, sys.maxsize))),
                block_table=list(range(1 + 30 * sequence, 31 + 30 * sequence)),
                budget=rng.randint(1, 5),
                params=params,
                seed=rng.getrandbits(64),
            )
            for sequence in range(rng.randint(1, 6))
        ]
        assert loop.try_draft(starts) == stepwise.draft(starts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3", "olmo2"])
def test_fused_norms_are_the_models_own(architecture: str, dtype: torch.dtype) -> None:
    model = make_model(architecture).to("cuda", dtype).eval()
    norms: list[Any] = [one for one in model.modules() if type(one).__name__.endswith("RMSNorm")]
    with torch.inference_mode():
        inputs = [torch.randn((33, norm.weight.shape[0]), device="cuda").to(dtype) for norm in norms]
        for norm in norms:
            norm.weight.normal_(mean=0.5)
        expected = [norm(x) for norm, x in zip(norms, inputs, strict=True)]
        assert fuse_norms(model) == len(norms)
        for norm, x, wanted in zip(norms, inputs, expected, strict=True):
            got = norm(x)
            torch.testing.assert_close(got, wanted, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-5)
            if dtype is torch.bfloat16:
                assert (got != wanted).float().mean() < 0.02


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("architecture", ROTATING)
def test_fused_rotations_are_the_models_own(architecture: str, dtype: torch.dtype) -> None:
    model: Any = make_model(architecture).to("cuda", dtype).eval()
    fused = copy.deepcopy(model)
    assert fuse_rotary(fused) == model.config.get_text_config().num_hidden_layers
    input_ids = torch.arange(70, device="cuda")[None] * 7 % VOCAB_SIZE
    with torch.inference_mode():
        expected = model(input_ids=input_ids, use_cache=False).logits
        assert torch.equal(fused(input_ids=input_ids, use_cache=False).logits, expected)
