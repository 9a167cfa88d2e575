"""Which attention a model gets, and what is said when it cannot have it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from specdec.attention import registry
from specdec.attention.base import LayerAttention
from specdec.attention.native import NativeUnavailable
from specdec.attention.registry import choose_backend
from specdec.attention.triton import TritonUnavailable
from specdec.core.errors import ConfigError, ResourceError

LAYER = LayerAttention(layer_idx=0, num_heads=4, num_kv_heads=2, head_dim=64, scaling=1.0)
FACTS: dict[str, Any] = {"dtype": torch.float32, "layers": [LAYER], "max_context": 64}


class FakeTriton:
    """Stands for the kernels where there is no GPU."""

    name = "triton"

    def __init__(self, device: torch.device, *, max_context: int, batch_invariant: bool) -> None:
        self.made_for = (device.type, max_context)
        self.batch_invariant = batch_invariant

    def supports(self, dtype: torch.dtype, head_dim: int) -> bool:
        return head_dim <= 256


def missing(device: torch.device, *, max_context: int, batch_invariant: bool) -> None:
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
        assert not backend.batch_invariant


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


class FakeNative:
    """Stands for the C++ kernel where there is no compiler."""

    name = "cpu"

    def __init__(self, cache_dir: str | None) -> None:
        self.cache_dir = cache_dir

    def supports(self, dtype: torch.dtype, head_dim: int) -> bool:
        return head_dim <= 256


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_cpu_gets_its_own_by_name(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CpuPagedAttention", FakeNative)
    device = torch.device("cpu")
    for name in ("cpu", "auto") if batch_invariant else ("cpu",):
        backend = choose_backend(
            name, device=device, **FACTS, batch_invariant=batch_invariant, cache_dir="here"
        )
        assert isinstance(backend, FakeNative)
        assert backend.cache_dir == "here"


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("device", "facts", "message"),
    [
        ("cuda", {}, "it runs on CPUs, and the device is cuda: set device to cpu, or leave"),
        ("cpu", {"dtype": torch.float16}, "it does not run float16: set dtype to float32 or bfloat16, or"),
    ],
)
def test_what_is_no_work_for_the_cpus_own(
    device: str, facts: dict[str, Any], message: str, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "CpuPagedAttention", FakeNative)
    with pytest.raises(ConfigError, match=f"attention_backend cpu: {message}"):
        choose_backend("cpu", device=torch.device(device), **FACTS | facts, batch_invariant=batch_invariant)


def test_the_cpus_own_cannot_be_had_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(registry, "CpuPagedAttention", FakeNative)
    with pytest.raises(ResourceError, match=r"attention_backend cpu: .* heads of 512; leave"):
        choose_backend("cpu", device=cpu, **{**FACTS, "layers": [large_heads()]})

    def unavailable(_cache_dir: str | None) -> None:
        raise NativeUnavailable("no compiler")

    monkeypatch.setattr(registry, "CpuPagedAttention", unavailable)
    with pytest.raises(ResourceError, match="attention_backend cpu: no compiler; leave att"):
        choose_backend("cpu", device=cpu, **FACTS)


@pytest.mark.parametrize("name", ["auto", "triton"])
def test_batch_invariant_on_a_gpu(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "TritonPagedAttention", FakeTriton)
    backend = choose_backend(name, device=torch.device("cuda"), **FACTS, batch_invariant=True)
    assert isinstance(backend, FakeTriton)
    assert backend.batch_invariant
    monkeypatch.setattr(registry, "TritonPagedAttention", missing)
    with pytest.raises(ResourceError, match="batch_invariant: no triton here"):
        choose_backend(name, device=torch.device("cuda"), **FACTS, batch_invariant=True)


def test_batch_invariant_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CpuPagedAttention", FakeNative)
    cpu = torch.device("cpu")
    assert choose_backend("auto", device=cpu, **FACTS, batch_invariant=True).name == "cpu"
    with pytest.raises(ResourceError, match="heads of 512"):
        choose_backend("auto", device=cpu, **{**FACTS, "layers": [large_heads()]}, batch_invariant=True)

    def unavailable(_cache_dir: str | None) -> None:
        raise NativeUnavailable("no compiler")

    monkeypatch.setattr(registry, "CpuPagedAttention", unavailable)
    with pytest.raises(ResourceError, match="batch_invariant: no compiler"):
        choose_backend("auto", device=cpu, **FACTS, batch_invariant=True)


def large_heads() -> LayerAttention:
    return LayerAttention(layer_idx=0, num_heads=4, num_kv_heads=2, head_dim=512, scaling=1.0)
