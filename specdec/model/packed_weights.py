"""Linear weights in the layout that the C++ side reads."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch

from specdec.kv.huge_pages import huge_zeros
from specdec.model.lowering import ExpertsDown, ExpertsUp, LinearLayer, Operation
from specdec.model.quantized_linear import QuantizedWeight
from specdec.model.recording import CannotLower

_PANEL_COLUMNS = 32
_ARENA_BYTES = 1 << 26
_WeightKey = tuple[int, torch.Size, tuple[int, ...]]
"""Address, shape and strides."""


class PackedWeights:
    """Linear weights in the kernel's layout, each packed once, as many as the memory allows."""

    def __init__(self, library: ctypes.CDLL, max_bytes: int, borrowed: PackedWeights | None = None) -> None:
        """Pack with `library`; what `borrowed` has packed already is taken from there."""
        self._library = library
        self._borrowed = borrowed
        self._max_bytes = max_bytes
        # The weight beside its panels keeps its address from being used again.
        self._packed: dict[_WeightKey, tuple[torch.Tensor, torch.Tensor]] = {}
        self._arena = torch.empty(0, dtype=torch.uint8)
        self.num_bytes = 0
        self._left_out: set[_WeightKey] = set()

    @property
    def num_left_out(self) -> int:
        """Weights for which there was no memory."""
        return len(self._left_out)

    def pack(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the panels of `weight` [..., columns, inner]; None when there is no memory for them.

        The panels of several matrices lie one after the other.

        A weight that is not packed is read as it is, which gives the same results and costs time where
        weights are in the cache or rows are many.

        Raises:
            CannotLower: it cannot be read as it is either.
        """
        key = (weight.data_ptr(), weight.shape, weight.stride())
        if self._borrowed is not None and key in self._borrowed._packed:
            return self._borrowed._packed[key][1]
        if key in self._packed:
            return self._packed[key][1]
        *stack, columns, inner = weight.shape
        each = panel_bytes(weight)
        size = each * math.prod(stack)
        if self.num_bytes + size > self._max_bytes:
            if weight.stride(-1) != 1:
                raise CannotLower(f"its packed weights take more than max_frozen_bytes = {self._max_bytes}")
            self._left_out.add(key)
            return None
        panels = (self if self._borrowed is None else self._borrowed)._allocate(size)
        entry_point = (
            self._library.drafthouse_pack_f32
            if weight.dtype is torch.float32
            else self._library.drafthouse_pack_bf16
        )
        for index, matrix in enumerate(weight.reshape(-1, columns, inner) if stack else [weight]):
            dense = matrix.contiguous()
            entry_point(
                ctypes.c_void_p(dense.data_ptr()),
                ctypes.c_int64(columns),
                ctypes.c_int64(inner),
                ctypes.c_void_p(panels.data_ptr() + index * each),
            )
        self._packed[key] = (weight, panels)
        self.num_bytes += size
        return panels

    def renewed(
        self, replaced: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> tuple[PackedWeights, dict[int, torch.Tensor]]:
        """Return other weights in the same layout, and their panels by the address of those here.

        Raises:
            CannotLower: one of them has no replacement.
        """
        assert self._borrowed is None, "what is borrowed is not this one's to replace"
        other = PackedWeights(self._library, self._max_bytes)
        panels: dict[int, torch.Tensor] = {}
        for weight, present in self._packed.values():
            new = replaced(weight)
            if new is None:
                raise CannotLower(f"a weight of shape {list(weight.shape)} is not one of the model's own")
            packed = other.pack(new)
            assert packed is not None, "as large as what is here"
            panels[present.data_ptr()] = packed
        return other, panels

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        """Side by side, so that small weights share huge pages."""
        if self._arena.numel() < num_bytes:
            self._arena = huge_zeros([max(num_bytes, _ARENA_BYTES)], torch.uint8)
        panels, self._arena = self._arena[:num_bytes], self._arena[-(-num_bytes // 64) * 64 :]
        return panels


def products_of(operation: Operation) -> int:
    """Return how many numbers an operation multiplies with weights for each of its rows."""
    match operation:
        case LinearLayer(weight=torch.Tensor() as weight):
            return weight.numel()
        case LinearLayer(weight=QuantizedWeight() as quantized):
            return quantized.num_columns * quantized.num_inputs
        case ExpertsUp(inputs=(_, chosen), gate=gate, up=up):
            return chosen.value.row_size * (gate[0].numel() + up[0].numel())
        case ExpertsDown(inputs=(_, chosen, _), weight=weight):
            return chosen.value.row_size * weight[0].numel()
    return 0


def panel_bytes(weight: torch.Tensor) -> int:
    """Return the size of the panels of one matrix of `weight` [..., columns, inner]."""
    *_, columns, inner = weight.shape
    return int(-(-columns // _PANEL_COLUMNS) * _PANEL_COLUMNS * inner * weight.element_size())


def weights_of(operation: Operation) -> tuple[torch.Tensor, ...]:
    """Return the weights of an operation that are to be packed; quantized ones are as they must be."""
    match operation:
        case LinearLayer(weight=torch.Tensor() as weight) | ExpertsDown(weight=weight):
            return (weight,)
        case ExpertsUp(gate=gate, up=up):
            return (gate, up)
    return ()
