"""RMS norms as one kernel: found and told apart by what they compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from specdec.model import fused_norms
from specdec.model.fused_norms import fuse_norms
from tests.architectures import VOCAB_SIZE, make_model
from tests.triton_interpreter import needs_interpreter


def norms_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]


def logits_of(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=input_ids, use_cache=False).logits.float()


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3", "olmo2"])
def test_the_model_computes_the_same(architecture: str, dtype: torch.dtype) -> None:
    model = make_model(architecture).to(dtype).eval()
    for module in norms_of(model):
        torch.nn.init.normal_(module.weight, mean=0.5)  # type: ignore[arg-type]
    fused = copy.deepcopy(model)
    assert fuse_norms(fused) == len(norms_of(model)) > 0
    assert fuse_norms(fused) == 0, "each is replaced once"
    input_ids = torch.arange(6)[None] * 7 % VOCAB_SIZE
    expected = logits_of(model, input_ids)
    tolerance = 1e-4 if dtype is torch.float32 else 0.05
    difference = (logits_of(fused, input_ids) - expected).abs().max() / expected.abs().max()
    assert difference < tolerance


@needs_interpreter
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_rounding_is_that_of_the_module(architecture: str) -> None:
    """Llama rounds before the weight, Gemma after it. In fp16: the interpreter cuts bf16 off."""
    norm: Any = norms_of(make_model(architecture).half())[0]
    torch.nn.init.normal_(norm.weight, mean=0.5)
    x = torch.randn(200, norm.weight.shape[0]).half()
    with torch.inference_mode():
        expected = norm(x)
        assert fuse_norms(norm) == 1
        assert (norm(x) != expected).float().mean() < 0.02


@needs_interpreter
def test_rounding_at_the_wrong_place_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison above."""
    norm: Any = norms_of(make_model("llama").half())[0]
    torch.nn.init.normal_(norm.weight, mean=0.5)
    x = torch.randn(200, norm.weight.shape[0]).half()
    monkeypatch.setattr(
        fused_norms, "_FORMS", [form for form in fused_norms._FORMS if not form.rounds_before]
    )
    with torch.inference_mode():
        expected = norm(x)
        assert fuse_norms(norm) == 1
        assert (norm(x) != expected).float().mean() > 0.05


@needs_interpreter
def test_what_only_looks_like_one_keeps_its_forward() -> None:
    class StrangeRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / x.abs().mean(-1, keepdim=True)

    strange = StrangeRMSNorm()
    assert fuse_norms(strange) == 0
    assert "forward" not in vars(strange)


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox"])
def test_layer_norms_are_left_alone(architecture: str) -> None:
    assert fuse_norms(make_model(architecture)) == 0
