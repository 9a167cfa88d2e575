"""The rotary embedding as one kernel: the same bits, or the model's own."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from specdec.model import fused_rotary
from specdec.model.fused_rotary import fuse_rotary, fused_rotation
from tests.architectures import VOCAB_SIZE, make_model
from tests.triton_interpreter import needs_interpreter

# The interpreter cuts numbers off that it rounds to bf16: there the comparison is left to tests/gpu.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])


def attention_of(model: torch.nn.Module) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Attention")]


def rotated_alone(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count what a model's own function is still called for."""
    calls: list[int] = []
    namespace = type(attention_of(model)[0]).forward.__globals__
    own = namespace["apply_rotary_pos_emb"]

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return own(*args, **options)

    monkeypatch.setitem(namespace, "apply_rotary_pos_emb", counted)
    return calls


@needs_interpreter
@DTYPES
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3", "phi3", "llama_yarn", "falcon"])
def test_the_model_computes_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, architecture: str, dtype: torch.dtype
) -> None:
    model = make_model(architecture).to(dtype).eval()
    fused = copy.deepcopy(model)
    calls = rotated_alone(model, monkeypatch)
    num_layers = model.config.get_text_config().num_hidden_layers
    assert fuse_rotary(fused) == num_layers
    assert fuse_rotary(fused) == 0, "each is replaced once"
    calls.clear()
    input_ids = torch.arange(6)[None] * 7 % VOCAB_SIZE
    with torch.inference_mode():
        got = fused(input_ids=input_ids, use_cache=False).logits
        assert not calls, "the model's own function has nothing left to do"
        expected = model(input_ids=input_ids, use_cache=False).logits
    assert len(calls) == num_layers, "and another model of the same class keeps it"
    assert torch.equal(got, expected)


@needs_interpreter
def test_what_one_sequence_does_not_cover_goes_to_the_models_function() -> None:
    own = modeling_llama.apply_rotary_pos_emb
    rotate = fused_rotation(own)
    query, key = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)
    cos, sin = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    assert all(map(torch.equal, rotate(query, key, cos, sin), own(query, key, cos, sin)))
    turned = [one.transpose(1, 2) for one in (query[:1], key[:1])]
    options: dict[str, Any] = {"unsqueeze_dim": 2}
    ours = rotate(*turned, cos[:1], sin[:1], **options)
    assert all(map(torch.equal, ours, own(*turned, cos[:1], sin[:1], **options)))


def test_models_without_rotation_are_left_alone() -> None:
    assert fuse_rotary(make_model("gpt2")) == 0


@needs_interpreter
def test_models_that_rotate_otherwise_keep_their_own(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("cohere2")
    with caplog.at_level("INFO", logger=fused_rotary.__name__):
        assert fuse_rotary(model) == 0
    assert all("forward" not in vars(module) for module in attention_of(model))
    assert "keeps it" in caplog.text


@needs_interpreter
def test_a_function_that_only_looks_alike_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison: the sign of the sine is another."""
    own = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda query, key, cos, sin: own(query, key, cos, -sin)
    )
    model = make_model("llama")
    assert fuse_rotary(model) == 0
    monkeypatch.undo()
    assert fuse_rotary(model) == model.config.num_hidden_layers
    assert all(isinstance(module.forward, MethodType) for module in attention_of(model))
