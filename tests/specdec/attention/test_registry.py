"""Which attention a model gets, and what is said when it cannot have it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from specdec.attention import registry
from specdec.attention.base import LayerAttention
from specdec.attention.registry import choose_backend
from specdec.attention.triton import TritonUnavailable
from specdec.core.errors import ResourceError

LAYER = LayerAttention(layer_idx=0, num_heads=4, num_kv_heads=2, head_dim=64, scaling=1.0)
FACTS: dict[str, Any] = {"dtype": torch.float32, "layers": [LAYER], "max_context": 64}


class FakeTriton:
    """Stands for the kernels where there is no GPU."""

    name = "triton"

    def __init__(self, device: torch.device, *, max_context: int) -> None:
        self.made_for = (device.type, max_context)

    def supports(self, dtype: torch.dtype, head_dim: int) -> bool:
        return head_dim <= 256


def missing(device: torch.device, *, max_context: int) -> None:
    raise TritonUnavailable("no triton here")


def test_a_cpu_gets_the_portable_one() -> None:
    assert choose_backend("auto", device=torch.device("cpu"), **FACTS).name == "sdpa"


@pytest.mark.parametrize(("name", "expected"), [("auto", "triton"), ("triton", "triton"), ("sdpa", "sdpa")])
def test_a_gpu_gets_triton(name: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "TritonPagedAttention", FakeTriton)
    backend = choose_backend(name, device=torch.device("cuda"), **FACTS)
    assert backend.name == expected
    if isinstance(backend, FakeTriton):
        assert backend.made_for == ("cuda", 64)


@pytest.mark.parametrize("reason", ["missing", "heads"])
def test_what_was_not_asked_for_is_replaced_with_a_warning(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "TritonPagedAttention", missing if reason == "missing" else FakeTriton)
    facts = FACTS if reason == "missing" else {**FACTS, "layers": [large_heads()]}
    with caplog.at_level(logging.WARNING):
        assert choose_backend("auto", device=torch.device("cuda"), **facts).name == "sdpa"
    assert ("no triton here" if reason == "missing" else "heads of 512") in caplog.text


def test_what_was_asked_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "TritonPagedAttention", missing)
    with pytest.raises(ResourceError, match="attention_backend triton: no triton here"):
        choose_backend("triton", device=torch.device("cuda"), **FACTS)


def test_a_cpu_cannot_have_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ResourceError, match="runs on CUDA devices, not on cpu"):
        choose_backend("triton", device=torch.device("cpu"), **FACTS)


def large_heads() -> LayerAttention:
    return LayerAttention(layer_idx=0, num_heads=4, num_kv_heads=2, head_dim=512, scaling=1.0)
