"""Pipes over NCCL, between a GPU of this process and one of another's.

Not run on GPUs yet: everything around it is tested with Gloo in its place (`tests/specdec/transport`), and
`tests/gpu/test_tensor_lanes.py` is for a machine with two GPUs.

A communicator does its operations in order, so that each direction has one of its own: two ends that both
began with a send would wait for each other. What has begun occupies the GPU until the peer takes part, and is
ended by `abort` alone: `shutdown`, and destruction without an abort, wait for the peer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed import PrefixStore, Store

from specdec.transport.device_lane import DeviceLanes, Pipe, Transfer
from specdec.transport.lane_choice import TensorLane, own_end

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.0001
_ENDS: Final = (0, 1)
_PROCESS_STAYS: Final = {
    # By default PyTorch ends the process when a communicator fails: here only a link has failed.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # CleanUpOnly
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_construction = threading.Lock()


def nccl_lanes(wanted: TensorLane, device: torch.device) -> DeviceLanes | None:
    """Return how lanes of `device`, where a model of this process runs, are opened; None: there are none.

    Raises:
        ConfigError: nccl is configured and cannot be used here.
    """
    if wanted == "gloo":
        return None
    end = own_end(wanted, backend=_backend(), device=_name(device))
    if not (end.backend and end.device):
        return None
    return DeviceLanes(end, lambda store, rank, timeout_s: NcclPipe.open(store, rank, device, timeout_s))


class NcclPipe:
    """Implements `Pipe` by two communicators of two."""

    def __init__(self, groups: tuple[Any, Any], rank: int, device: torch.device) -> None:
        """Use `open`.

        Args:
            groups: by the rank of the end that sends in it.
            rank: of this end.
            device: with its index.
        """
        self._groups: tuple[Any, Any] | None = groups
        self._rank = rank
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """Of what is received: it must not wait for what the model computes."""
        self._lock = threading.Lock()

    @classmethod
    def open(cls, store: Store, rank: int, device: torch.device, timeout_s: float) -> Pipe:
        """Meet the other end; see `DeviceLanes.open`. Communicators are made with their first operations."""
        device = torch.device("cuda", _index(device))
        torch.cuda.set_device(device)  # of this thread
        patience = timedelta(seconds=timeout_s)
        with _process_stays():
            groups = (_group(store, 0, rank, patience), _group(store, 1, rank, patience))
        pipe = cls(groups, rank, device)
        try:
            probe = torch.zeros(1, dtype=torch.uint8, device=device)
            for (
                sender
            ) in _ENDS:  # in the same order at both ends: whoever makes a communicator waits for the other
                (pipe.send if sender == rank else pipe.receive)(probe).wait(patience)
        except RuntimeError:
            pipe.abort()
            raise
        return pipe

    @property
    def device(self) -> torch.device:
        """See `Pipe.device`."""
        return self._device

    def empty(self, num_bytes: int) -> torch.Tensor:
        """See `Pipe.empty`."""
        with torch.cuda.stream(self._stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def send(self, flat: torch.Tensor) -> Transfer:
        """See `Pipe.send`; behind what the thread's current stream computes."""
        return _NcclTransfer(self, self._group_of(self._rank).send([flat], 1 - self._rank, 0))

    def receive(self, flat: torch.Tensor) -> Transfer:
        """See `Pipe.receive`."""
        with torch.cuda.stream(self._stream):
            work = self._group_of(1 - self._rank).recv([flat], 1 - self._rank, 0)
        # It is read by models, on the default stream, and its memory must not be given away before.
        flat.record_stream(torch.cuda.default_stream(self._device))
        return _NcclTransfer(self, work)

    def read_seal(self, seal: torch.Tensor) -> tuple[int, int]:
        """See `Pipe.read_seal`."""
        with torch.cuda.stream(self._stream):
            number, num_bytes = seal.tolist()
        return number, num_bytes

    @property
    def is_aborted(self) -> bool:
        """Whether it has ended at this end."""
        return self._groups is None

    def abort(self) -> None:
        """See `Pipe.abort`. In a thread of its own: NCCL may take a while to let go of a peer that hangs."""
        with self._lock:
            groups, self._groups = self._groups, None
        if groups is not None:
            threading.Thread(target=_abort, args=(groups,), name="nccl-abort", daemon=True).start()

    def _group_of(self, sender: int) -> Any:
        with self._lock:
            if self._groups is None:
                raise RuntimeError("the NCCL communicators of this link have been aborted")
            return self._groups[sender]


class _NcclTransfer:
    """Implements `Transfer`; by polling: `wait` of a work of NCCL has a stream wait, not the thread."""

    def __init__(self, pipe: NcclPipe, work: Any) -> None:
        self._pipe = pipe
        self._work = work

    def wait(self, patience: timedelta) -> None:
        """See `Transfer.wait`."""
        until_s = time.monotonic() + patience.total_seconds()
        while not self._work.is_completed():
            if self._pipe.is_aborted:
                raise RuntimeError("the NCCL communicators of this link have been aborted")
            if time.monotonic() >= until_s:
                raise RuntimeError(f"a transfer by NCCL took more than {patience.total_seconds()} s")
            time.sleep(_POLL_S)


def _group(store: Store, sender: int, rank: int, patience: timedelta) -> Any:
    backend: Any = distributed.ProcessGroupNCCL  # not in CPU builds of torch
    options = backend.Options()
    options._timeout = patience
    return backend(PrefixStore(f"from-{sender}", store), rank, len(_ENDS), options)


def _abort(groups: tuple[Any, Any]) -> None:
    for group in groups:
        try:
            group.abort()
        except RuntimeError as error:
            logger.warning("an NCCL communicator could not be aborted: %s", error)


@contextlib.contextmanager
def _process_stays() -> Iterator[None]:
    """Have groups that are made here end nothing but themselves; they read it when they are made."""
    with _construction:
        before = {name: os.environ.get(name) for name in _PROCESS_STAYS}
        os.environ.update(_PROCESS_STAYS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _backend() -> str:
    """Return name and version of NCCL in this PyTorch; empty: it has none."""
    if not (distributed.is_available() and distributed.is_nccl_available()):
        return ""
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return f"nccl {'.'.join(str(part) for part in version)}"


def _name(device: torch.device) -> str:
    """Return a GPU's own name in the world (two processes that share one say the same); empty: it is none."""
    if device.type != "cuda":
        return ""
    return f"gpu {torch.cuda.get_device_properties(_index(device)).uuid}"


def _index(device: torch.device) -> int:
    index: int | None = device.index  # torch's stub has it that there always is one
    return torch.cuda.current_device() if index is None else index
