"""Records what a model's forward computes, operation by operation, by running it.

The model runs eagerly, twice, on a few rows each, with another number of rows and of logit rows the second
time. Operations are seen as PyTorch dispatches them, before they are split into smaller ones (inference
mode); one that changes a fresh tensor in place is noted as one that makes a new tensor. What differs between
the two recordings is what depends on the number of rows; where they differ in anything but sizes, the
forward depends on its data and is not something that can be lowered.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATTEND = "attend"
"""Stands in the place of an operation where the model calls its attention."""
EXPERTS = "experts"
"""Stands where the model hands rows to the experts that its router chose; see `experts`."""
ALL_REDUCE = "all_reduce"
"""Stands where a tensor is replaced by its sum over the ranks of a group."""
ALL_GATHER = "all_gather"
"""Stands where every rank gets everyone's tensor, stacked in front."""
SPREAD = "spread"
"""Stands where the elements of a row go to places of a wider one, which is -inf elsewhere."""

NUM_ROWS = (3, 5)
NUM_LOGIT_ROWS = (2, 4)
"""Rows and logit rows of the first and second recording."""


class CannotLower(Exception):
    """The forward does something that has no native form; the text names it. It still runs eagerly."""


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded operation."""

    name: str
    """`aten.mul.Tensor`, or a name of ours (`ATTEND`, ...)."""
    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[torch.Tensor, ...]
    mutates: bool


class EmbeddingShard(NamedTuple):
    """What a rank holds of an embedding: token ids first, first + 1, ..; those of other ranks give zeros."""

    first: int
    vocab_size: int
    """Of all ranks."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One run."""

    calls: tuple[Call, ...]
    input_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    output: torch.Tensor
    """Logits, or hidden states of a stage before the last."""
    incoming: torch.Tensor | None
    """Hidden states of the stage before."""
    hidden: torch.Tensor | None
    """Hidden states that are handed out beside the output, [T, width]; None: there are none."""
    shards: Mapping[int, EmbeddingShard]
    """By address of the weight."""


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
        return self._recorder.note(ATTEND, (layer_idx, query, key, value), output)


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


def active_recorder() -> Recorder | None:
    """Return what records this thread's forward now: parts of a model that have a native form tell it."""
    return _active.recorder


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every dispatched operation; all tensors stay alive, so that memory addresses stay unique."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.shards: dict[int, EmbeddingShard] = {}
        """By address of the weight: embeddings whose lookups are meant so."""
        self._paused = False
        self._fresh: set[int] = set()
        # What stands for the memory that was changed in place, by its address.
        self._renewed: dict[int, torch.Tensor] = {}

    def paused(self) -> _Pause:
        """While entered, nothing is noted."""
        return _Pause(self)

    def note(self, name: str, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        """Note an operation of ours that gives `output`, a fresh tensor; return it."""
        self._add(name, None, self.current(args), {}, output, mutates=False)
        return output

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and note it."""
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        out_of_place = self._out_of_place(func, args) if func._schema.is_mutable else None
        if out_of_place is not None:
            return self._renew(out_of_place, args, kwargs)
        noted_args, noted_kwargs = self.current((args, kwargs))
        result = func(*args, **kwargs)
        mutates = func._schema.is_mutable
        self._add(str(func), func, noted_args, noted_kwargs, self.current(result), mutates=mutates)
        return result

    def _add(
        self,
        name: str,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        *,
        mutates: bool,
    ) -> None:
        outputs = result if isinstance(result, tuple | list) else (result,)
        tensors = tuple(output for output in outputs if isinstance(output, torch.Tensor))
        self._fresh.update(map(_address, tensors))
        self.calls.append(Call(name, function, args, kwargs, tensors, mutates))

    def _out_of_place(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The operation that gives what the in-place `func` leaves in its first argument.

        None where there is none, or where that argument is not the whole of something computed here.
        """
        name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
        if not name.endswith("_") or not hasattr(torch.ops.aten, name[:-1]):
            return None
        changed = args[0]
        is_whole = changed.is_contiguous() and changed.untyped_storage().nbytes() == changed.nbytes
        if not is_whole or _address(changed) not in self._fresh:
            return None
        return getattr(getattr(torch.ops.aten, name[:-1]), overload, None)

    def _renew(self, out_of_place: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Note the new tensor, which from now on stands for the memory that is changed."""
        changed: torch.Tensor = args[0]
        noted_args, noted_kwargs = self.current((args, kwargs))
        with self.paused():
            new = out_of_place(*args, **kwargs).to(changed.dtype).contiguous()
            changed.copy_(new)
        self._add(str(out_of_place), out_of_place, noted_args, noted_kwargs, new, mutates=False)
        self._renewed[_address(changed)] = new
        return changed

    def current(self, structure: Any) -> Any:
        """Return `structure` with what stands for memory that was changed in place."""
        if not self._renewed:
            return structure
        if isinstance(structure, torch.Tensor):
            new = self._renewed.get(_address(structure))
            if new is None or structure is new:
                return structure
            if new.shape == structure.shape and new.stride() == structure.stride():
                return new
            with self.paused():
                return new.as_strided(structure.shape, structure.stride(), structure.storage_offset())
        if isinstance(structure, list | tuple):
            return type(structure)(self.current(item) for item in structure)
        if isinstance(structure, dict):
            return {key: self.current(value) for key, value in structure.items()}
        return structure


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


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


ModelCall = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, RecordingAttention, torch.Tensor | None], torch.Tensor
]
"""One eager forward: `runner.ModelRunner.call_model`."""


HiddenOf = Callable[[], torch.Tensor]
"""What a forward hands out beside its output, right after it: `hidden_taps.LayerTaps.rows`."""


def record(
    call_model: ModelCall, incoming: torch.Tensor | None = None, hidden_of: HiddenOf | None = None
) -> tuple[Recording, Recording]:
    """Run the model twice, with `NUM_ROWS` rows and `NUM_LOGIT_ROWS` logit rows.

    `incoming` are made-up hidden states [1, max(NUM_ROWS), hidden_size] of the stage before, if there is one;
    `hidden_of` returns hidden states that the forward hands out, if it does.

    Raises:
        CannotLower: the two runs did different things.
    """
    with single_threaded():
        first, second = (
            _record_once(call_model, num_rows, num_logit_rows, incoming, hidden_of)
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
def _record_once(
    call_model: ModelCall,
    num_rows: int,
    num_logit_rows: int,
    incoming: torch.Tensor | None,
    hidden_of: HiddenOf | None,
) -> Recording:
    input_ids = torch.arange(num_rows)[None]
    positions = torch.arange(num_rows)[None]
    logit_rows = torch.arange(num_logit_rows)
    if incoming is not None:
        incoming = incoming[:, :num_rows].clone()
    recorder = _active.recorder = Recorder()
    try:
        with recorder:
            attention = RecordingAttention(recorder)
            output = call_model(input_ids, positions, logit_rows, attention, incoming)
            hidden = None if hidden_of is None else hidden_of()
    finally:
        _active.recorder = None
    output = recorder.current(output)
    return Recording(
        tuple(recorder.calls),
        input_ids,
        positions,
        logit_rows,
        output,
        incoming,
        recorder.current(hidden),
        recorder.shards,
    )
