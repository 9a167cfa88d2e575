"""The library FlashInfer on a GPU, where it is installed: the suite of all backends, a model, an engine.

That our arguments mean the right attention is tested without a GPU (tests/specdec/attention); here it is
the library that is looked at.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import transformers

from specdec.attention.base import AttentionBackend
from specdec.attention.config import FLASHINFER_HEAD_DIMS
from specdec.attention.flashinfer import (
    FlashInferAttention,
    FlashInferUnavailable,
    MakeWrapper,
    load_flashinfer,
)
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.acceleration import attention_of
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.loader import load_model
from specdec.model.runner import ModelRunner
from specdec.proposers.config import SpeculativeConfig
from tests.architectures import ARCHITECTURES, VOCAB_SIZE, make_tokenizer
from tests.specdec.attention.contract import AttentionContract

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BLOCK_SIZE = 4


def library() -> MakeWrapper:
    try:
        return load_flashinfer(CUDA)
    except FlashInferUnavailable as error:
        pytest.skip(str(error))


class TestFlashInfer(AttentionContract):
    """It cuts contexts by what else is in the batch, and so promises no bits."""

    device: ClassVar[torch.device] = CUDA
    finest: ClassVar[torch.dtype] = torch.bfloat16
    head_dims: ClassVar[Collection[int] | None] = FLASHINFER_HEAD_DIMS
    small_head: ClassVar[int] = 64
    rows_are_bitwise = False
    paths_are_bitwise = False
    company_is_bitwise = False
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.bfloat16: 2e-2, torch.float16: 5e-3}

    def make_backend(self) -> AttentionBackend:
        return FlashInferAttention(CUDA, library())

    @pytest.mark.parametrize("head_dim", FLASHINFER_HEAD_DIMS)
    @pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
    def test_half_precision(self, backend: AttentionBackend, trees: bool, head_dim: int) -> None:
        shapes = [(1, 700), (4, 9), (70, 30)]
        options = {"head_dim": head_dim, "trees": trees, "window": 40, "softcap": 20.0}
        self.check(backend, self.make_case(shapes, dtype=torch.float16, **options))

    def test_a_large_batch(self, backend: AttentionBackend) -> None:
        shapes = [(5, 1400), (1, 3000), (1, 511), (9, 40), (200, 700), (1, 0), (128, 2000), (33, 5)]
        self.check(backend, self.make_case(shapes, heads=(32, 8), head_dim=128))


def save(folder: Path, architecture: str, seed: int = 0) -> str:
    """Save a random bf16 model with heads that FlashInfer runs."""
    torch.manual_seed(seed)
    usual = ARCHITECTURES[architecture]()
    config = type(usual)(**{**usual.to_dict(), "head_dim": 64})
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.bfloat16().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def random_batch(trees: bool, num_blocks: int) -> list[SequenceSlice]:
    rng = random.Random(1)
    free = list(range(1, num_blocks))
    rng.shuffle(free)
    slices = []
    for rows, start in ((1, 30), (6, 11), (20, 0), (1, 0), (6, 50)):
        table = [free.pop() for _ in range(-(-(start + rows) // BLOCK_SIZE))]
        parents = [rng.randrange(-1, row) for row in range(rows)] if trees and rows == 6 else None
        slices.append(
            SequenceSlice(
                token_ids=rng.choices(range(VOCAB_SIZE), k=rows),
                start=start,
                block_table=table,
                num_logit_rows=rows,
                parents=parents,
            )
        )
    return slices


@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mistral", "gemma3"])
def test_a_model_computes_what_it_does_with_the_reference(
    tmp_path: Path, architecture: str, trees: bool
) -> None:
    library()
    config = ModelConfig(
        model=save(tmp_path, architecture), device="cuda", dtype="bfloat16", attention_backend="flashinfer"
    )
    loaded = load_model(config)
    outputs = []
    for name in ("flashinfer", "sdpa"):
        cache = CacheConfig(num_blocks=100, block_size=BLOCK_SIZE)
        runner = ModelRunner(
            loaded, cache, max_num_seqs=8, backend=attention_of(loaded, name, CompileConfig())
        )
        torch.manual_seed(2)
        for pool in (*runner.pool.keys, *runner.pool.values):
            pool.normal_()
        outputs.append(runner.forward(random_batch(trees, runner.num_blocks)))
    own, expected = outputs
    assert (own - expected).norm() / expected.norm() < 0.03


def test_an_engine_whose_models_both_use_it(tmp_path: Path) -> None:
    library()
    asked = {"device": "cuda", "dtype": "bfloat16", "attention_backend": "flashinfer"}
    config = EngineConfig(
        target=ModelConfig.model_validate({"model": save(tmp_path / "target", "llama"), **asked}),
        speculative_config=SpeculativeConfig.model_validate(
            {
                "controller": "fixed",
                "method": "draft_model",
                "model": save(tmp_path / "draft", "gemma2", seed=1),
                **asked,
            }
        ),
        cache=CacheConfig(num_blocks=200, block_size=BLOCK_SIZE),
    )
    prompts = [[(7 * index + 3 * step) % 100 + 2 for step in range(3 + 9 * index)] for index in range(5)]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    with Engine(config) as engine:
        results = list(engine.generate(prompts, params))
    assert [len(result.token_ids) for result in results] == [20] * 5
