"""Records what a device does as CUDA graphs, and leaves PyTorch usable where that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

_READS = frozenset(
    {
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
    }
)
"""Operations whose result the host reads, or whose size it needs."""
_COPIES = frozenset({"_to_copy", "to", "copy", "copy_"})
_abandoned: list[torch.cuda.CUDAGraph] = []
"""Graphs whose recording failed. PyTorch's allocator of pinned memory goes on asking them."""


class CannotRecord(Exception):
    """The model's forward cannot be replayed; the text says why."""


class Recorder(Protocol):
    """Records what a device does."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run `run`, and return what repeats its work on the device without calling it.

        Whatever `run` reads and writes must stay where it is; it must not wait for the device.

        Raises:
            CannotRecord: it does.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: only the results of the last one run are there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all graphs: cuBLAS keeps 32 MiB of workspace for each stream that it has ever run on.
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder`."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            try:
                with torch.cuda.stream(self._side):
                    run()  # kernels are compiled and libraries take their memory
                    with NoHostWaits(self._device):
                        run()
            finally:
                current.wait_stream(self._side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                # thread_local: other threads of the process go on using their devices meanwhile.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
                ):
                    run()
            except BaseException:
                self._end_failed(graph, current)
                raise
        replay: Callable[[], None] = graph.replay
        return replay

    def _end_failed(self, graph: torch.cuda.CUDAGraph, current: torch.cuda.Stream) -> None:
        """Undo what a failed recording leaves behind in PyTorch up to 2.12 at least.

        The side stream stays the thread's current one; the allocator believes the recording to be under way,
        and refuses to give memory back, which every other recording begins with; and the generator of random
        numbers refuses to work, and with it the replays of all other graphs.
        """
        _abandoned.append(graph)
        torch.cuda.set_stream(current)
        with suppress(RuntimeError):  # it has been ended: nothing is left to undo
            torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
        try:
            # The generator is told of the end of a recording that succeeds.
            with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                torch.zeros(1, device=self._device)
        except RuntimeError as error:
            logger.warning("PyTorch may refuse CUDA graphs and random numbers from here on: %s", error)


class NoHostWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, operations that make the host wait for the device raise CannotRecord.

    As far as they are seen here; CUDA itself finds the others while it records, but after that little works
    as before (`CudaRecorder._end_failed`).
    """

    def __init__(self, device: torch.device) -> None:
        """`device` is where the work is done that is to be recorded."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = device.type

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation, or refuse it."""
        kwargs = kwargs or {}
        if self._waits(func, args, kwargs):
            raise CannotRecord(f"it waits for the device ({func})")
        return func(*args, **kwargs)

    def _waits(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        name = func._schema.name.removeprefix("aten::")
        if name in _COPIES:
            return self._copies_to_another(name, args, kwargs)
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        if not any(one.device.type == self._kind for one in tensors):
            return False
        if name in _READS or str(func) == "aten.where.default":
            return True
        if name == "repeat_interleave":
            return func._overloadname != "self_int" and kwargs.get("output_size") is None
        return name == "index" and any(
            one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
        )

    def _copies_to_another(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a copy is between this kind of device and another, and the host waits for its end."""
        if name in ("copy", "copy_"):
            source, destination = args[1], args[0].device
        else:
            source = args[0]
            places = [
                one.device if isinstance(one, torch.Tensor) else one
                for one in (*args[1:], kwargs.get("device"))
                if isinstance(one, torch.Tensor | torch.device)
            ]
            destination = places[0] if places else source.device
        kinds = {source.device.type, destination.type}
        if len(kinds) == 1 or self._kind not in kinds:
            return False
        is_asynchronous = kwargs.get("non_blocking", False) or any(one is True for one in args)
        return not (is_asynchronous and source.is_cpu and source.is_pinned())
