"""CUDA graphs on a CPU: records every tensor operation and every Triton launch, and repeats just these.

As with a real graph, Python does not run again, numbers that came from the host are frozen, and memory stays
where it was. What a step reads from the host, or keeps in new tensors, therefore shows as a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from specdec.attention import triton as triton_module


class WaitsForDevice(RuntimeError):
    """As CUDA refuses it during a recording."""


_READ_BY_HOST = frozenset({"aten.item.default", "aten._local_scalar_dense.default", "aten.nonzero.default"})


class ReplayingRecorder(TorchDispatchMode):
    """Implements `graph_recorder.Recorder`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._calls: list[Callable[[], None]] = []
        self._is_recording = False
        self._launch = triton_module.launch
        monkeypatch.setattr(triton_module, "launch", self._record_launch)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self._calls = calls = []
        self._is_recording = True
        try:
            with self:
                run()
        finally:
            self._is_recording = False

        def replay() -> None:
            with torch.inference_mode():
                for call in calls:
                    call()

        return replay

    def _record_launch(self, *args: Any, **kwargs: Any) -> None:
        def call() -> None:
            self._launch(*args, **kwargs)

        if self._is_recording:
            self._calls.append(call)
        with _disable_current_modes():
            call()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func) in _READ_BY_HOST:
            raise WaitsForDevice(str(func))
        result = func(*args, **kwargs)
        memory = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)
        }
        made = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        fresh = [leaf for leaf in made if leaf.untyped_storage().data_ptr() not in memory]
        if not fresh and not func._schema.is_mutable:
            return result  # a view: its memory is that of what it looks at

        def call() -> None:
            again = func(*args, **kwargs)
            for old, new in zip(made, tree_leaves(again), strict=True):
                if any(old is one for one in fresh):
                    old.copy_(new)

        self._calls.append(call)
        return result
