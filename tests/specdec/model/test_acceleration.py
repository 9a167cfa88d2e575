"""Which form of its forward a model gets on its device, and what is said where it gets none."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.attention.base import AttentionBackend
from specdec.attention.flashinfer import FlashInferAttention
from specdec.attention.sdpa import SdpaAttention
from specdec.attention.triton import TritonPagedAttention
from specdec.core.errors import ResourceError
from specdec.model.acceleration import accelerate, attention_of, later_bytes
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig
from specdec.model.runner import ModelRunner
from tests.specdec.attention.contract import CPU
from tests.specdec.attention.flashinfer_double import Doubles
from tests.specdec.model.conftest import Pair

PairOf = Callable[[str], Pair]


def batch(trees: bool) -> list[SequenceSlice]:
    """Prompts of three lengths, or (over the same blocks) the rows that come behind them."""
    slices = []
    for number, length in enumerate((3, 20, 41)):
        table = tuple(range(1 + 20 * number, 21 + 20 * number))
        rows = 6 if trees else length
        slices.append(
            SequenceSlice(
                token_ids=tuple((7 * number + 3 * row) % 100 + 2 for row in range(rows)),
                start=length if trees else 0,
                block_table=table,
                num_logit_rows=rows,
                parents=(-1, 0, 0, 1, 2, -1) if trees and number else None,
            )
        )
    return slices


def logits(pair: Pair, backend: AttentionBackend) -> list[torch.Tensor]:
    runner = pair.runner()
    runner.backend = backend
    return [runner.forward(slices) for slices in (batch(trees=False), batch(trees=True))]


@pytest.mark.parametrize(
    ("architecture", "num_kinds"),
    [("llama", 1), ("mistral", 1), ("gemma2", 2), ("gemma3", 2), ("gpt2", 1), ("falcon", 1)],
)
def test_a_whole_forward_through_flashinfers_arguments(
    pair_of: PairOf, architecture: str, num_kinds: int
) -> None:
    """Prompts, then trees and a chain in one batch; windows and soft caps as the models have them."""
    doubles = Doubles()
    own = logits(pair_of(architecture), FlashInferAttention(CPU, doubles))
    expected = logits(pair_of(architecture), SdpaAttention())
    for got, wanted in zip(own, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
    assert doubles.num_plans == 2 * num_kinds
    assert doubles.num_runs == 2 * len(pair_of(architecture).loaded.layers)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gemma3", "gpt2", "falcon"])
def test_a_whole_eager_forward_through_the_cpus_own(pair_of: PairOf, architecture: str) -> None:
    pair = pair_of(architecture)
    try:
        backend = attention_of(pair.loaded, "cpu", CompileConfig())
    except ResourceError as error:
        pytest.skip(f"the C++ attention cannot be built here: {error}")
    assert backend.name == "cpu"
    for got, wanted in zip(logits(pair, backend), logits(pair, SdpaAttention()), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
    assert attention_of(pair.loaded, "auto", CompileConfig()).name == "sdpa"


def on_paper_cuda(pair: Pair, backend: AttentionBackend) -> ModelRunner:
    """A runner that takes itself to be on a GPU."""
    runner = pair.runner()
    runner.loaded = replace(runner.loaded, device=torch.device("cuda"))
    runner.backend = backend
    return runner


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "flashinfer": lambda: FlashInferAttention(CPU, Doubles()),
    "sdpa": SdpaAttention,
}


@pytest.mark.parametrize("name", BACKENDS)
def test_what_cannot_be_recorded_says_so(
    pair_of: PairOf, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = BACKENDS[name]()
    runner = on_paper_cuda(pair_of("llama"), backend)
    with caplog.at_level(logging.WARNING):
        made = accelerate(runner, CompileConfig())
    assert made.state == "off"
    assert "runs eagerly, without CUDA graphs" in caplog.text
    assert f"attention_backend {name} cannot be recorded" in caplog.text


@pytest.mark.parametrize("asked", [{"mode": "off"}, {"cuda_graph_max_rows": 0}])
def test_who_wants_no_graphs_is_not_told_of_them(
    pair_of: PairOf, asked: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    runner = on_paper_cuda(pair_of("llama"), FlashInferAttention(CPU, Doubles()))
    with caplog.at_level(logging.WARNING):
        accelerate(runner, CompileConfig.model_validate(asked))
    assert caplog.text == ""


def test_memory_for_graphs_is_left_only_where_there_will_be_some(pair_of: PairOf) -> None:
    loaded = on_paper_cuda(pair_of("llama"), SdpaAttention()).loaded
    for make in BACKENDS.values():
        assert later_bytes(loaded, CompileConfig(), make()) == 0
    triton = object.__new__(TritonPagedAttention)
    assert later_bytes(loaded, CompileConfig(), triton) > 100 << 20
    assert later_bytes(loaded, CompileConfig(mode="off"), triton) == 0
