"""Records what a model's forward computes, operation by operation, by running it.

The model runs eagerly, twice, on a few rows each, with another number of rows and of logit rows the second
time. Operations are seen as PyTorch dispatches them, before they are split into smaller ones (inference
mode). What differs between the two recordings is what depends on the number of rows; where they differ in
anything but sizes, the forward depends on its data and is not something that can be lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATTEND = "attend"
"""Stands in the place of an operation where the model calls its attention."""

NUM_ROWS = (3, 5)
NUM_LOGIT_ROWS = (2, 4)
"""Rows and logit rows of the first and second recording."""


class CannotLower(Exception):
    """The forward does something that has no native form; the text names it. It still runs eagerly."""


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded operation."""

    name: str
    """`aten.mul.Tensor`, or `ATTEND`."""
    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[torch.Tensor, ...]
    mutates: bool


@dataclass(frozen=True, slots=True)
class Recording:
    """One run."""

    calls: tuple[Call, ...]
    input_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    logits: torch.Tensor


class RecordingAttention:
    """Given to the model as `paged`: notes the call and answers with anything of the right shape."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """See `PagedBatch.attend`."""
        with self._recorder.paused():
            output = torch.ones(query.shape, dtype=query.dtype)
        self._recorder.calls.append(
            Call(ATTEND, None, (layer_idx, query, key, value), {}, (output,), mutates=False)
        )
        return output


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every dispatched operation; all tensors stay alive, so that memory addresses stay unique."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._paused = False

    def paused(self) -> _Pause:
        """While entered, nothing is noted."""
        return _Pause(self)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._paused:
            outputs = result if isinstance(result, tuple | list) else (result,)
            tensors = tuple(output for output in outputs if isinstance(output, torch.Tensor))
            self.calls.append(Call(str(func), func, args, kwargs, tensors, func._schema.is_mutable))
        return result


class _Pause:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._recorder._paused = True

    def __exit__(self, *_: object) -> None:
        self._recorder._paused = False


@contextmanager
def single_threaded() -> Iterator[None]:
    """PyTorch's own operations run on one thread: on a few rows, waking others costs more than it saves."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


ModelCall = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""(input_ids [1, T], positions [1, T], logit_rows [L], paged) -> logits [L, vocab]: one eager forward."""


def record(call_model: ModelCall) -> tuple[Recording, Recording]:
    """Run the model twice, with `NUM_ROWS` rows and `NUM_LOGIT_ROWS` logit rows.

    Raises:
        CannotLower: the two runs did different things.
    """
    with single_threaded():
        first, second = (
            _record_once(call_model, num_rows, num_logit_rows)
            for num_rows, num_logit_rows in zip(NUM_ROWS, NUM_LOGIT_ROWS, strict=True)
        )
    names = [[call.name for call in recording.calls] for recording in (first, second)]
    if names[0] != names[1]:
        different = next(
            (pair for pair in zip(*names, strict=False) if pair[0] != pair[1]), ("more calls", "fewer")
        )
        raise CannotLower(f"what it computes depends on its input ({different[0]} against {different[1]})")
    return first, second


@torch.inference_mode()
def _record_once(call_model: ModelCall, num_rows: int, num_logit_rows: int) -> Recording:
    input_ids = torch.arange(num_rows)[None]
    positions = torch.arange(num_rows)[None]
    logit_rows = torch.arange(num_logit_rows)
    recorder = Recorder()
    with recorder:
        logits = call_model(input_ids, positions, logit_rows, RecordingAttention(recorder))
    return Recording(tuple(recorder.calls), input_ids, positions, logit_rows, logits)
