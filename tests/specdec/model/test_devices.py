"""Names of devices, by which measured costs are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.core.errors import ResourceError
from specdec.model import devices as module
from specdec.model.devices import device_name, require_gpus_used, resolve_device

CPU = torch.device("cpu")


def test_a_cpu_is_its_model_and_its_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz: fast\n\nmodel name\t: another\n")
    monkeypatch.setattr(module, "_CPU_INFO", info)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert device_name(CPU) == "cpu Some CPU @ 2 GHz: fast, 3 threads"


def test_where_the_system_tells_nothing_there_is_still_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CPU_INFO", tmp_path / "none")
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert device_name(CPU).startswith("cpu riscv64, ")


def test_a_gpu_is_its_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA No. {device.index}")
    assert device_name(torch.device("cuda", 1)) == "cuda NVIDIA No. 1"


def test_an_unusable_device() -> None:
    with pytest.raises(ResourceError, match="device 'no-such-device' cannot be used"):
        resolve_device("no-such-device")


def test_a_gpu_that_was_given_is_not_left_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image without CUDA in a pod with a GPU: it would serve, many times slower, and nobody would know."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match=r"PyTorch \(.*\) sees no GPU: this worker was given 2"):
        require_gpus_used("auto", 2)
    require_gpus_used("auto", 0)
    require_gpus_used("cpu", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    require_gpus_used("auto", 2)
