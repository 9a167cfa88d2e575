"""A lowered forward as the C++ side runs it: instructions (`instructions.py`), buffers, packed weights."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import torch

from specdec.attention.base import LayerAttention, LayerCaches
from specdec.attention.cpu import (
    NativeLayer,
    NativeObservation,
    native_layer,
    native_observation,
    native_step,
)
from specdec.attention.metadata import AttentionMetadata
from specdec.attention.native import load_library
from specdec.attention.observation import Observation
from specdec.kv.huge_pages import huge_zeros
from specdec.model.batch import NO_TOKEN, Generated, NativeChooser, SequenceSlice
from specdec.model.instructions import NO_BUFFER, Encoder, Instruction
from specdec.model.lowering import domain_of
from specdec.model.packed_weights import PackedWeights, products_of, weights_of
from specdec.model.parallel.shared_slots import RankSlots
from specdec.model.recording import CannotLower
from specdec.model.schedule import Step
from specdec.model.trace import Ref, Value

SOURCE = Path(__file__).parent / "csrc" / "forward.cpp"
QUANTIZED_SOURCE = Path(__file__).parent / "csrc" / "quantized_linear.cpp"

_LOST_RANK = 2


class _Inputs(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("token_ids", ctypes.c_void_p),
        ("position_ids", ctypes.c_void_p),
        ("logit_rows", ctypes.c_void_p),
        ("num_logit_rows", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    ]


class _Chooser(ctypes.Structure):
    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("choose", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class _Scratch:
    """A buffer that grows with the batch."""

    index: int
    row_bytes: int
    domain: str


@dataclass(frozen=True, slots=True)
class StagedForward:
    """What a forward reads instead of its weights, once it takes it."""

    of: NativeForward
    weights: PackedWeights
    buffers: dict[int, torch.Tensor]
    """By index: whatever depends on weights."""


def load_quantized_kernel(cache_dir: Path) -> ctypes.c_void_p:
    """Build or load the kernels of quantized linear layers; return the function that `NativeForward` calls.

    Raises:
        NativeUnavailable: they cannot be built or loaded here.
    """
    library = load_library(QUANTIZED_SOURCE, cache_dir)
    return ctypes.cast(library.drafthouse_quantized_linear, ctypes.c_void_p)


def load_forward_library(cache_dir: Path) -> ctypes.CDLL:
    """Build or load the C++ side.

    Raises:
        NativeUnavailable: it cannot be built or loaded here.
    """
    library = load_library(SOURCE, cache_dir)
    assert library.drafthouse_instruction_size() == ctypes.sizeof(Instruction), "structs differ from C++"
    library.drafthouse_program_create.restype = ctypes.c_void_p
    for name in (
        "program_destroy",
        "program_set_buffer",
        "program_set_quantized_linear",
        "program_set_link",
        "program_set_hidden",
        "program_set_feedback",
        "pack_f32",
        "pack_bf16",
    ):
        getattr(library, f"drafthouse_{name}").restype = None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.drafthouse_program_generate.argtypes = (
        *(pointer, pointer, pointer, integer),
        *(pointer, pointer, ctypes.c_int32, pointer, pointer, pointer, pointer),
    )
    library.drafthouse_program_run_rows.argtypes = (pointer,) * 6
    return library


class NativeForward:
    """Runs scheduled operations on batches of any size. Not thread-safe."""

    def __init__(
        self,
        library: ctypes.CDLL,
        steps: Sequence[Step],
        buffers: dict[Value, int],
        tables: dict[Value, torch.Tensor],
        *,
        output: Ref,
        hidden: Ref | None = None,
        incoming: Value | None = None,
        weights: PackedWeights,
        layers: Sequence[LayerAttention],
        quantized_kernel: ctypes.c_void_p | None = None,
        slots: RankSlots | None = None,
    ) -> None:
        """Encode the instructions.

        Args:
            library: what `load_forward_library` returned.
            steps: the operations, in order.
            buffers: buffer number of every row value.
            tables: [positions, row size] of every position value.
            output: the result, all of one of the row values.
            hidden: hidden states that are kept beside it, all of one of the row values.
            incoming: what every run is given beside token ids.
            weights: where linear weights are packed.
            layers: attention of the layers, consecutive ones of the model.
            quantized_kernel: what `load_quantized_kernel` returned; needed where a weight is quantized.
            slots: where ranks hand each other rows, with some memory in them; None: there are no ranks.

        Raises:
            CannotLower: something does not fit the instruction format.
        """
        self._library = library
        self._buffers = buffers
        self._incoming_buffer = NO_BUFFER
        self._tables = tables
        self._weights = weights
        self._layers = layers
        self._slots = slots
        self._scratch = _scratch_buffers(buffers)
        num_buffers = len(set(buffers.values()))
        if incoming is not None:
            self._incoming_buffer = num_buffers
            self._buffers = {**buffers, incoming: self._incoming_buffer}
            num_buffers += 1
        encoder = Encoder(
            self._buffers,
            num_buffers,
            tables,
            weights=weights,
            layers=layers,
            has_quantized_kernel=quantized_kernel is not None,
            slots=slots,
        )
        self._output_buffer = buffers[output.value]
        self.num_operations = len(steps)
        self.weight_bytes = sum(one.nbytes for step in steps for one in weights_of(step.operation))
        """Of what is not quantized; every run reads them."""
        self.products_per_row = sum(
            products_of(step.operation) for step in steps if domain_of(step.operation) == "rows"
        )
        """Products of numbers and weights for every row, whether it yields logits or not."""
        self._output_value = output.value
        self._hidden_value = None if hidden is None else hidden.value
        instructions = [instruction for step in steps for instruction in encoder.encode(step)]
        self._fixed = encoder.fixed
        self.meetings: Sequence[tuple[bool, int]] = encoder.meetings
        """Where ranks meet, in order: whether rows are put side by side, and bytes of a rank's row."""
        array = (Instruction * len(instructions))(*instructions)
        self._program = ctypes.c_void_p(
            library.drafthouse_program_create(
                ctypes.byref(array),
                ctypes.c_int64(len(instructions)),
                ctypes.c_int64(encoder.num_buffers),
                ctypes.c_int64(encoder.num_plans),
                ctypes.c_int32(self._output_buffer),
                ctypes.c_int32(output.value.row_size),
            )
        )
        library.drafthouse_program_set_quantized_linear(self._program, quantized_kernel)
        if slots is not None:
            library.drafthouse_program_set_link(self._program, ctypes.byref(slots.native), len(self.meetings))
        if self._hidden_value is not None:
            library.drafthouse_program_set_hidden(
                self._program,
                self._buffers[self._hidden_value],
                ctypes.c_int64(self._hidden_value.row_size * self._hidden_value.dtype.itemsize),
            )
        for index, tensor in self._fixed.items():
            self._set_buffer(index, tensor)
        self._capacity = {"rows": 0, "logit_rows": 0}
        self._memory: dict[str, torch.Tensor] = {}
        self._output = torch.empty(0)
        self._hidden = torch.empty(0)
        self._run: Callable[..., int] = library.drafthouse_program_run
        self._generate: Callable[..., int] = library.drafthouse_program_generate

    def __del__(self) -> None:
        if getattr(self, "_program", None) is not None:
            self._library.drafthouse_program_destroy(self._program)

    def stage(self, replaced: Callable[[torch.Tensor], torch.Tensor | None]) -> StagedForward:
        """Prepare other weights; any thread, while this one runs.

        Raises:
            CannotLower: something that it reads was computed from weights, so that it has no replacement.
        """
        weights, panels = self._weights.renewed(replaced)
        tables = {table.data_ptr() for table in self._tables.values()}
        buffers: dict[int, torch.Tensor] = {}
        for index, tensor in self._fixed.items():
            if tensor.data_ptr() in tables:
                continue
            new = panels.get(tensor.data_ptr())
            new = replaced(tensor) if new is None else new
            if new is None:
                raise CannotLower(f"something of shape {list(tensor.shape)} was computed from its weights")
            buffers[index] = new
        return StagedForward(self, weights, buffers)

    def take(self, staged: StagedForward) -> None:
        """Run with what was staged for this forward from now on."""
        assert staged.of is self
        self._weights = staged.weights
        self._fixed.update(staged.buffers)
        for index, tensor in staged.buffers.items():
            self._set_buffer(index, tensor)

    def bind_caches(self, caches: LayerCaches) -> ctypes.Array[NativeLayer]:
        """Describe K/V pools for `run`; the pools must outlive the result."""
        layers = [
            native_layer(layer, keys, values)
            for layer, keys, values in zip(self._layers, caches.keys, caches.values, strict=True)
        ]
        return (NativeLayer * len(layers))(*layers)

    def run(
        self,
        input_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        metadata: AttentionMetadata,
        caches: ctypes.Array[NativeLayer],
        position_ids: torch.Tensor,
        incoming: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one batch, write its K/V; return the output, valid until the next run.

        That is fp32 logits [L, vocab], or hidden states [T, hidden_size].

        Args:
            input_ids: int64 [1, T] or [T], contiguous.
            logit_rows: int64 [L].
            metadata: the batch, T rows.
            caches: what `bind_caches` returned.
            position_ids: int64 [T], rows of the tables over positions.
            incoming: [1, T, hidden_size], contiguous, where the forward begins with it.

        Raises:
            IndexError: a token id or a logit row is out of range.
            TransportError: another rank is gone.
        """
        num_logit_rows = logit_rows.shape[0]
        self._reserve("rows", metadata.num_rows)
        self._reserve("logit_rows", num_logit_rows)
        inputs = _Inputs(
            *(input_ids.data_ptr(), position_ids.data_ptr(), logit_rows.data_ptr()),
            *(num_logit_rows, torch.get_num_threads()),
        )
        self._set_incoming(incoming)
        step = native_step(metadata)
        self._raise_failure(self._run(self._program, ctypes.byref(step), caches, ctypes.byref(inputs)))
        is_of_logits = self._output_value.domain == "logit_rows"
        return self._output[: num_logit_rows if is_of_logits else metadata.num_rows]

    def run_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Run a forward of rows [T, width] that attend to nothing; return its output, as `run` does.

        All of them yield logits, where that is what comes out.
        """
        self._run_rows(rows, None, None, None, None)
        return self._output[: rows.shape[0]]

    def choose_behind(
        self, rows: torch.Tensor, chooser: NativeChooser, sequences: Sequence[int], positions: Sequence[int]
    ) -> list[int]:
        """Run rows [T, width] that attend to nothing, and choose a token from the logits of each.

        Row i is of sequence `sequences[i]` of the chooser, its token will stand at `positions[i]`. `NO_TOKEN`
        where there is none.
        """
        chosen = array("q", (NO_TOKEN,)) * rows.shape[0]
        of_rows, at = array("i", sequences), array("q", positions)
        assert len(of_rows) == len(at) == len(chosen)
        native = _Chooser(chooser.function, chooser.parameters)
        self._run_rows(
            *(rows, ctypes.byref(native)),
            *(of_rows.buffer_info()[0], at.buffer_info()[0], chosen.buffer_info()[0]),
        )
        return chosen.tolist()

    def _run_rows(
        self,
        rows: torch.Tensor,
        chooser: Any,
        sequences: int | None,
        positions: int | None,
        chosen: int | None,
    ) -> None:
        num_rows = rows.shape[0]
        self._reserve("rows", num_rows)
        self._reserve("logit_rows", num_rows)
        self._set_incoming(rows)
        every = array("q", range(num_rows))
        address = every.buffer_info()[0]  # nothing is looked up by token or position
        inputs = _Inputs(address, address, address, num_rows, torch.get_num_threads())
        run = self._library.drafthouse_program_run_rows
        self._raise_failure(run(self._program, ctypes.byref(inputs), chooser, sequences, positions, chosen))

    def go_on_with_hidden(self) -> None:
        """Let what is generated behind a row be given its hidden states as `incoming`."""
        assert self._hidden_value is not None, "none are kept"
        incoming = next(value for value, index in self._buffers.items() if index == self._incoming_buffer)
        assert incoming.row_size == self._hidden_value.row_size
        assert incoming.dtype is self._hidden_value.dtype
        self._library.drafthouse_program_set_feedback(self._program, self._incoming_buffer)

    def hidden(self, num_rows: int) -> torch.Tensor:
        """Return hidden states [num_rows, width] of the latest run, which had so many rows.

        They are valid until the next run. Of one with further tokens (`generate`), those of its last forward.
        """
        assert self._hidden_value is not None, "none are kept"
        return self._hidden[:num_rows]

    def room_for_hidden(self, num_rows: int) -> torch.Tensor:
        """Return memory for the hidden states of so many rows, [num_rows, width]."""
        assert self._hidden_value is not None, "none are kept"
        return torch.empty((num_rows, self._hidden_value.row_size), dtype=self._hidden_value.dtype)

    def generate(
        self,
        slices: Sequence[SequenceSlice],
        num_more: Sequence[int],
        chooser: NativeChooser,
        caches: ctypes.Array[NativeLayer],
        incoming: torch.Tensor | None = None,
        observation: Observation | None = None,
        hidden: torch.Tensor | None = None,
    ) -> Generated:
        """Run slices and choose tokens from their logits; see `GeneratingRunner.try_generate`.

        With `incoming` (see `run`) there is one forward: `num_more` is 0 everywhere, unless the others are to
        `go_on_with_hidden`. The first forward is the one that is observed. `hidden`, of `room_for_hidden`,
        takes the hidden states of every forward: slice after slice those of its rows and of the tokens behind
        them, but the last; what a slice does not come to stays as it is.

        Raises:
            IndexError: a token id is out of range.
        """
        token_ids = array("q", chain.from_iterable(piece.token_ids for piece in slices))
        described = array("q")
        kept: list[array[int]] = []  # they must live as long as the call
        num_logit_rows = num_tokens = 0
        block_size = caches[0].block_size
        for piece, more in zip(slices, num_more, strict=True):
            num_rows, table = len(piece.token_ids), piece.block_table
            if not isinstance(table, array):
                table = array("i", table)
            assert piece.start + num_rows + more <= len(table) * block_size, "the block table ends too early"
            assert piece.num_logit_rows <= num_rows
            parents = None if piece.parents is None else array("i", piece.parents)
            assert parents is None or more == 0, "nothing follows the last row of a tree"
            assert piece.num_known == 0 or len(piece.parents or ()) == piece.num_known + num_rows
            kept += (table,) if parents is None else (table, parents)
            described.extend((table.buffer_info()[0], piece.start, num_rows, piece.num_logit_rows, more))
            described.extend(piece.shift or (0, 0))
            described.append(piece.num_dropped)
            described.append(0 if parents is None else parents.buffer_info()[0])
            described.append(piece.num_known)  # together, `dh::Slice`
            num_logit_rows += piece.num_logit_rows
            num_tokens += piece.num_logit_rows + more
        self._reserve("rows", len(token_ids))
        self._reserve("logit_rows", num_logit_rows)
        self._set_incoming(incoming)
        chosen = array("q", (NO_TOKEN,)) * num_tokens
        seconds = array("d", (0.0, 0.0))
        native_chooser = _Chooser(chooser.function, chooser.parameters)
        observed = NativeObservation() if observation is None else native_observation(observation)
        failure = self._generate(
            *(self._program, caches, described.buffer_info()[0], len(slices)),
            *(token_ids.buffer_info()[0], ctypes.byref(native_chooser), torch.get_num_threads()),
            *(chosen.buffer_info()[0], None if hidden is None else hidden.data_ptr()),
            *(seconds.buffer_info()[0], ctypes.byref(observed)),
        )
        self._raise_failure(failure)
        return Generated(chosen.tolist(), *seconds)

    def _raise_failure(self, failure: int) -> None:
        if failure == _LOST_RANK:
            assert self._slots is not None
            self._slots.raise_lost()
        if failure:
            raise IndexError("a token id or a logit row is out of range")

    def _reserve(self, domain: str, num_rows: int) -> None:
        """Make the scratch buffers hold `num_rows` rows."""
        if num_rows <= self._capacity[domain]:
            return
        capacity = max(num_rows, 2 * self._capacity[domain], 16)
        mine = [scratch for scratch in self._scratch if scratch.domain == domain]
        sizes = [-(-scratch.row_bytes * capacity // 64) * 64 + 64 for scratch in mine]
        memory = huge_zeros([sum(sizes)], torch.uint8)
        self._memory[domain] = memory
        start = 0
        for scratch, size in zip(mine, sizes, strict=True):
            part = memory[start : start + size]
            self._set_buffer(scratch.index, part)
            if scratch.index == self._output_buffer:
                self._output = _rows_in(part, self._output_value, capacity)
            if self._hidden_value is not None and scratch.index == self._buffers[self._hidden_value]:
                self._hidden = _rows_in(part, self._hidden_value, capacity)
            start += size
        self._capacity[domain] = capacity
        if self._slots is not None:
            # Ranks run the same batches, and so come here together.
            row_bytes = max((row_bytes for _, row_bytes in self.meetings), default=0)
            self._slots.reserve(row_bytes * max(self._capacity.values()))

    def _set_incoming(self, incoming: torch.Tensor | None) -> None:
        assert (incoming is None) == (self._incoming_buffer == NO_BUFFER)
        if incoming is not None:
            assert incoming.is_contiguous()
            self._set_buffer(self._incoming_buffer, incoming)

    def _set_buffer(self, index: int, tensor: torch.Tensor) -> None:
        self._library.drafthouse_program_set_buffer(
            self._program, ctypes.c_int64(index), ctypes.c_void_p(tensor.data_ptr())
        )


def _scratch_buffers(buffers: dict[Value, int]) -> list[_Scratch]:
    found: dict[int, _Scratch] = {}
    for value, index in buffers.items():
        assert value.domain is not None
        found[index] = _Scratch(index, value.row_size * value.dtype.itemsize, value.domain)
    return list(found.values())


def _rows_in(memory: torch.Tensor, value: Value, capacity: int) -> torch.Tensor:
    """Rows of a value that lie in a buffer, [capacity, row size]."""
    used = memory[: value.dtype.itemsize * capacity * value.row_size]
    return used.view(value.dtype).view(capacity, value.row_size)
