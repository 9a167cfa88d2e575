"""What a model runs on, and its name: costs are measured for it, and are of no use on another."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from specdec.core.errors import ResourceError

_CPU_INFO = Path("/proc/cpuinfo")


def resolve_device(name: str) -> torch.device:
    """Return the device of a configuration's `device`.

    Raises:
        ResourceError: it cannot be used.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ResourceError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def require_gpus_used(name: str, num_gpus: int) -> None:
    """Refuse the CPU in place of GPUs that this process was given.

    Args:
        name: a configuration's `device`.
        num_gpus: that this process was given. Of a device that is named it is known what it is.

    Raises:
        ResourceError: `auto` would be the CPU.
    """
    if num_gpus and name == "auto" and not torch.cuda.is_available():
        raise ResourceError(
            f"this image's PyTorch ({torch.__version__}) sees no GPU: this worker was given {num_gpus}, and "
            "would compute on the CPU. Use an image with CUDA (the chart: image.tag), on a node whose driver "
            "fits it, give the bundle no GPU, or write device: cpu"
        )


def device_name(device: torch.device) -> str:
    """Return what kind of device this is: equal names promise about equal speed.

    Of a GPU its product name; of a CPU its model and the threads that PyTorch has of it.
    """
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    if device.type == "cpu":
        return f"cpu {_processor()}, {torch.get_num_threads()} threads"
    return device.type


def _processor() -> str:
    """Return the model of this machine's processor, as far as the system tells."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
