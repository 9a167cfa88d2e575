"""By what tensors travel between two peers: decided from what both say of themselves when they meet.

Without torch: the facts are gathered in `transport.nccl`, the outcome is acted on in `transport.gloo_door`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from specdec.core.errors import ConfigError

TensorLane = Literal["gloo", "nccl", "auto"]
"""What is configured: through the memory of the hosts; from GPU to GPU; the latter wherever it can be."""

KEY = "cluster.channels.tensors"


class LaneEnd(msgspec.Struct, frozen=True, array_like=True):
    """What one end wants, and what it has.

    It travels with a knock: fields may be added behind these, none may be changed.
    """

    wanted: TensorLane
    backend: str = ""
    """Library and version that would carry device memory: both ends need the same; empty: none."""
    device: str = ""
    """Which device, by a name that no other device in the cluster has; empty: none."""


def own_end(wanted: TensorLane, *, backend: str, device: str) -> LaneEnd:
    """Return what this process says of itself.

    Args:
        wanted: what is configured.
        backend: see `LaneEnd`.
        device: see `LaneEnd`.

    Raises:
        ConfigError: nccl is configured, and this process has none, or no GPU.
    """
    if wanted == "nccl" and not backend:
        raise ConfigError(
            f"{KEY}: nccl needs a build of PyTorch with NCCL, and this one has none: install one for CUDA, "
            "or write gloo or auto"
        )
    if wanted == "nccl" and not device:
        raise ConfigError(
            f"{KEY}: nccl needs target and draft workers on GPUs, and this worker has none: give its bundle "
            "num_gpus, or write gloo or auto"
        )
    return LaneEnd("gloo") if wanted == "gloo" else LaneEnd(wanted, backend, device)


def use_device_lane(host: LaneEnd, guest: LaneEnd | None) -> bool:
    """Whether tensors between two peers go from device to device; both ends go by what the host decides.

    A peer that says nothing is of an older version: it has nothing but Gloo, whatever the other wants.

    Raises:
        ConfigError: one of them is to use nothing but NCCL, and that cannot be.
    """
    if guest is None:
        return False
    obstacle = _obstacle(host, guest)
    if obstacle is None:
        return True
    if "nccl" in (host.wanted, guest.wanted):
        raise ConfigError(f"{KEY}: nccl cannot be used between two workers: {obstacle}; write gloo or auto")
    return False


def _obstacle(host: LaneEnd, guest: LaneEnd) -> str | None:
    """Return in words what speaks against a device lane."""
    if "gloo" in (host.wanted, guest.wanted):
        return "one of them is configured for gloo"
    if not (host.backend and guest.backend):
        return "one of them has a PyTorch without NCCL"
    if host.backend != guest.backend:
        return f"one has {host.backend}, the other {guest.backend}"
    if not (host.device and guest.device):
        return "one of them has no GPU"
    if host.device == guest.device:
        return f"both are on the GPU {host.device}, and NCCL takes one process for each"
    return None
