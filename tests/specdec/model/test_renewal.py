"""Other weights for a model that runs: what they give is what a model with them from the start gives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from specdec.core.errors import CheckpointError
from specdec.kv.config import CacheConfig
from specdec.model.batch import SequenceSlice
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import load_model
from specdec.model.renewal import stage, take
from specdec.model.runner import ModelRunner
from tests.architectures import VOCAB_SIZE, make_model, save_model

Weights = dict[str, torch.Tensor]


def weights_of(model: PreTrainedModel) -> Weights:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def runner_of(folder: Path, *, compiled: bool, dtype: str = "float32") -> ModelRunner:
    loaded = load_model(ModelConfig.model_validate({"model": str(folder), "dtype": dtype}))
    runner = ModelRunner(loaded, CacheConfig(num_blocks=40, block_size=4), max_num_seqs=4)
    if compiled:
        forward = runner.graphs = CompiledForward(runner, CompileConfig())
        assert forward.warm_up() == "ready"
    return runner


def logits(runner: ModelRunner) -> torch.Tensor:
    rng = random.Random(0)
    tokens = rng.choices(range(2, VOCAB_SIZE), k=9)
    piece = SequenceSlice(token_ids=tokens, start=0, block_table=range(1, 4), num_logit_rows=9)
    return runner.forward([piece]).clone()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(tmp_path / "llama", "llama_tied", num_layers=2)
    return tmp_path / "llama"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_new_weights_are_used_once_they_are_taken(folder: Path, tmp_path: Path, compiled: bool) -> None:
    runner = runner_of(folder, compiled=compiled)
    before = logits(runner)
    for seed in (1, 2):  # what was taken once is exchanged again
        other = save_model(tmp_path / f"other{seed}", "llama_tied", seed=seed, num_layers=2)
        present = logits(runner)
        staged = stage(runner, weights_of(other))
        assert torch.equal(logits(runner), present)
        assert take(runner, staged)
        expected = logits(runner_of(tmp_path / f"other{seed}", compiled=compiled))
        assert torch.equal(logits(runner), expected)
        assert not torch.allclose(expected, before, atol=0.1)


def test_weights_are_rounded_to_the_numbers_of_the_model(folder: Path) -> None:
    runner = runner_of(folder, compiled=True, dtype="bfloat16")
    before = logits(runner)
    assert take(runner, stage(runner, weights_of(make_model("llama_tied", num_layers=2))))
    assert torch.equal(logits(runner), before)
    assert all(one.dtype is torch.bfloat16 for one in runner.loaded.model.parameters())


def test_what_was_staged_for_another_form_of_the_forward_is_not_taken(folder: Path) -> None:
    runner = runner_of(folder, compiled=False)
    forward = runner.graphs = CompiledForward(runner, CompileConfig())
    before = logits(runner)
    other = weights_of(make_model("llama_tied", seed=1, num_layers=2))
    early = stage(runner, other)
    assert not take(runner, early)  # it is being compiled
    assert forward.warm_up() == "ready"
    assert not take(runner, early)
    assert torch.allclose(logits(runner), before, atol=1e-4)
    assert take(runner, stage(runner, other))
    assert not torch.allclose(logits(runner), before, atol=0.1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda weights: weights.update({"extra": torch.ones(1)}), "the model has no extra"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(3)}),
            r"model.norm.weight is \[3\] where the model has \[32\]",
        ),
    ],
    ids=["missing", "extra", "shape"],
)
def test_weights_of_another_model_are_refused(folder: Path, change, said: str) -> None:  # type: ignore[no-untyped-def]
    weights = weights_of(make_model("llama_tied", seed=1, num_layers=2))
    change(weights)
    runner = runner_of(folder, compiled=False)
    with pytest.raises(CheckpointError, match=said):
        stage(runner, weights)


def test_what_was_computed_from_weights_when_compiling_is_not_overlooked(tmp_path: Path) -> None:
    """Gemma adds one to the weights of its norms: what is compiled holds the sums."""
    save_model(tmp_path, "gemma2", num_layers=2)
    weights = weights_of(make_model("gemma2", seed=1, num_layers=2))
    with pytest.raises(CheckpointError, match=r"compile\.mode is off"):
        stage(runner_of(tmp_path, compiled=True), weights)
    eager = runner_of(tmp_path, compiled=False)
    assert take(eager, stage(eager, weights))
