"""Gloo in NCCL's place: pipes of host memory, so that all of a device lane but NCCL itself runs on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from specdec.transport.device_lane import DeviceLanes, Pipe, Transfer
from specdec.transport.lane_choice import LaneEnd, TensorLane

_GLOO: Any = ProcessGroupGloo


class GlooPipe:
    """Implements `Pipe` by two groups of two, as NCCL has them."""

    def __init__(self, groups: tuple[Any, Any], rank: int) -> None:
        self._groups: tuple[Any, Any] | None = groups
        self._rank = rank
        self.num_received_bytes = 0
        self.is_aborted = False

    @classmethod
    def open(cls, store: Store, rank: int, timeout_s: float) -> GlooPipe:
        groups = tuple(_group(PrefixStore(f"from-{sender}", store), rank, timeout_s) for sender in (0, 1))
        pipe = cls(cast("tuple[Any, Any]", groups), rank)
        probe = torch.zeros(1, dtype=torch.uint8)
        for sender in (0, 1):
            (pipe.send if sender == rank else pipe.receive)(probe).wait(timedelta(seconds=timeout_s))
        return pipe

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def send(self, flat: torch.Tensor) -> Transfer:
        return cast("Transfer", self._group_of(self._rank).send([flat], 1 - self._rank, 0))

    def receive(self, flat: torch.Tensor) -> Transfer:
        self.num_received_bytes += flat.numel()
        return cast("Transfer", self._group_of(1 - self._rank).recv([flat], 1 - self._rank, 0))

    def read_seal(self, seal: torch.Tensor) -> tuple[int, int]:
        number, num_bytes = seal.tolist()
        return number, num_bytes

    def abort(self) -> None:
        self.is_aborted = True
        self._groups = None  # sockets close with the last reference

    def _group_of(self, sender: int) -> Any:
        if self._groups is None:
            raise RuntimeError("aborted")
        return self._groups[sender]


def gloo_lanes(
    device: str,
    *,
    wanted: TensorLane = "auto",
    backend: str = "stand-in 1",
    wrap: Callable[[GlooPipe], Pipe] = lambda pipe: pipe,
) -> DeviceLanes:
    """Lanes of a made-up device; `wrap` may put a fault into a pipe."""
    return DeviceLanes(
        LaneEnd(wanted, backend, device),
        lambda store, rank, timeout_s: wrap(GlooPipe.open(store, rank, timeout_s)),
    )


@functools.cache
def _device() -> Any:
    return _GLOO.create_device(hostname="127.0.0.1")


def _group(store: Store, rank: int, timeout_s: float) -> Any:
    options = _GLOO._Options()
    options._devices = [_device()]
    options._timeout = timedelta(seconds=timeout_s)
    return _GLOO(store, rank, 2, options)
