"""Linear layers with weights of 8 or 4 bits, laid out as the native kernel reads them.

There is one copy of such a weight, in panels (`csrc/quantized_linear.h` describes them), for the compiled
forward and the eager one alike. Eager, it is turned back into numbers a few panels at a time, on any device:
right, and slow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from specdec.kv.huge_pages import huge_zeros

Bits = Literal[4, 8]
_Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PANEL_COLUMNS = 32
"""Outputs that lie side by side."""

_CHUNK_ELEMENTS = 1 << 22
"""How many weights are turned back into numbers at a time."""
_ARENA_BYTES = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedWeight:
    """Small integers times the scale of their group: a stretch of one column's inputs."""

    bits: Bits
    num_columns: int
    """Outputs; the last panel may have more."""
    panels: torch.Tensor
    """uint8 [panels, bytes]"""
    scales: torch.Tensor
    """[panels, groups, PANEL_COLUMNS]; 8 bits: fp32, and one group; 4 bits: the model's dtype."""

    @property
    def num_inputs(self) -> int:
        """The inner dimension."""
        return self.panels.shape[1] * 8 // (PANEL_COLUMNS * self.bits)

    @property
    def num_bytes(self) -> int:
        """Memory of integers and scales."""
        return self.panels.nbytes + self.scales.nbytes

    def rows(self, first_panel: int, end_panel: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return int8 [columns, inputs] and scales [columns, groups] of some panels, the last ones padded."""
        panels, scales = self.panels[first_panel:end_panel], self.scales[first_panel:end_panel]
        values = _unpacked8(panels) if self.bits == 8 else _unpacked4(panels)
        return values, scales.transpose(1, 2).reshape(-1, scales.shape[1])


class WeightBuilder:
    """Takes the rows of a weight piece by piece."""

    def __init__(self, bits: Bits, num_columns: int, num_inputs: int, *, num_groups: int) -> None:
        """Allocate.

        Args:
            bits: 8 or 4.
            num_columns: outputs.
            num_inputs: an even number; 4 bits: a multiple of 8 * num_groups.
            num_groups: scales per column.
        """
        self._bits: Bits = bits
        self._num_columns = num_columns
        num_panels = -(-num_columns // PANEL_COLUMNS)
        panel_bytes = num_inputs * PANEL_COLUMNS * bits // 8
        self._panels = _ARENA.take(num_panels * panel_bytes).view(num_panels, panel_bytes)
        self._num_groups = num_groups
        self._scales: torch.Tensor | None = None

    def put(self, first_column: int, values: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the columns from `first_column` (a multiple of PANEL_COLUMNS) on.

        Args:
            first_column: number of the first of them.
            values: int8 [columns, inputs]; a multiple of PANEL_COLUMNS columns, but at the end.
            scales: [columns, groups].
        """
        missing = -values.shape[0] % PANEL_COLUMNS
        values = torch.nn.functional.pad(values, (0, 0, 0, missing))
        packed = _packed8(values) if self._bits == 8 else _packed4(values)
        panel = first_column // PANEL_COLUMNS
        self._panels[panel : panel + packed.shape[0]] = packed
        if self._scales is None:
            self._scales = scales.new_zeros(self._panels.shape[0], self._num_groups, PANEL_COLUMNS)
        by_panel = torch.nn.functional.pad(scales, (0, 0, 0, missing)).view(
            -1, PANEL_COLUMNS, self._num_groups
        )
        self._scales[panel : panel + packed.shape[0]] = by_panel.transpose(1, 2)

    def finish(self) -> QuantizedWeight:
        """Return the weight; all its columns have been put."""
        assert self._scales is not None
        return QuantizedWeight(
            bits=self._bits, num_columns=self._num_columns, panels=self._panels, scales=self._scales
        )


class QuantizedLinear(torch.nn.Module):
    """Stands in the place of a `torch.nn.Linear`."""

    panels: torch.Tensor
    scales: torch.Tensor
    bias: torch.nn.Parameter | None

    def __init__(self, weight: QuantizedWeight, bias: torch.nn.Parameter | None) -> None:
        """`bias`: [columns], in the dtype of the activations."""
        super().__init__()
        self.in_features = weight.num_inputs
        self.out_features = weight.num_columns
        self.bits: Bits = weight.bits
        self.register_buffer("panels", weight.panels)
        self.register_buffer("scales", weight.scales)
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., columns], in the dtype of `x`."""
        return self._product(x, self.bias)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """As `forward`, without the bias."""
        return self._product(x, None)

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product: torch.Tensor = torch.ops.drafthouse.quantized_linear(
            x, self.panels, self.scales, bias, self.out_features, self.bits
        )
        return product

    def extra_repr(self) -> str:
        """As `torch.nn.Linear`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


def quantized_linear(
    x: torch.Tensor,
    panels: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    num_columns: int,
    bits: Bits,
    *,
    multiply: _Multiply = torch.mm,
) -> torch.Tensor:
    """The operation `drafthouse::quantized_linear`, which is what a recording of a forward shows of it.

    Numbers are those of torchao's eager layers: 8 bits multiply the integers and scale the product; 4 bits
    scale the integers, round them to the dtype of `x`, and multiply. Only scale and bias of 8 bits are not
    rounded in between. `multiply` is the product of two matrices.
    """
    weight = QuantizedWeight(bits=bits, num_columns=num_columns, panels=panels, scales=scales)
    step = max(_CHUNK_ELEMENTS // (weight.num_inputs * PANEL_COLUMNS), 1)
    rows = x.reshape(-1, weight.num_inputs)
    parts = [
        _product(rows, weight, first, first + step, multiply) for first in range(0, panels.shape[0], step)
    ]
    product = torch.cat(parts, 1)[:, :num_columns]
    if bias is not None:
        product = product + bias.float()
    return product.to(x.dtype).view(*x.shape[:-1], num_columns)


def _product(
    x: torch.Tensor, weight: QuantizedWeight, first: int, end: int, multiply: _Multiply
) -> torch.Tensor:
    values, scales = weight.rows(first, end)
    if weight.bits == 8 and x.dtype is not torch.float16:  # in which sums of integers would overflow
        return multiply(x, values.to(x.dtype).t()).float() * scales.float().t()
    grouped = values.view(*scales.shape, -1).float() * scales.float()[..., None]
    return multiply(x, grouped.view(values.shape).to(x.dtype).t()).float()


def _packed8(values: torch.Tensor) -> torch.Tensor:
    """int8 [columns, inputs] -> uint8 [panels, bytes]: chunks [PANEL_COLUMNS][2]."""
    columns, inputs = values.shape
    chunks = values.view(columns // PANEL_COLUMNS, PANEL_COLUMNS, inputs // 2, 2).transpose(1, 2)
    return chunks.reshape(columns // PANEL_COLUMNS, -1).view(torch.uint8)


def _unpacked8(panels: torch.Tensor) -> torch.Tensor:
    chunks = panels.view(torch.int8).view(panels.shape[0], -1, PANEL_COLUMNS, 2)
    return chunks.transpose(1, 2).reshape(panels.shape[0] * PANEL_COLUMNS, -1)


def _packed4(values: torch.Tensor) -> torch.Tensor:
    """int8 [columns, inputs] -> uint8 [panels, bytes]: chunks [PANEL_COLUMNS] of 4 bytes, 8 inputs deep.

    Input 2 j + h is the j-th nibble of the h-th pair of bytes, lowest first.
    """
    columns, inputs = values.shape
    nibbles = (values & 15).view(torch.uint8)
    # panel, lane, chunk, pair of nibbles (j // 2), nibble in it (j % 2), half (h)
    split = nibbles.view(columns // PANEL_COLUMNS, PANEL_COLUMNS, inputs // 8, 2, 2, 2)
    ordered = split.permute(0, 2, 1, 5, 3, 4)
    return (ordered[..., 0] | (ordered[..., 1] << 4)).reshape(columns // PANEL_COLUMNS, -1)


def _unpacked4(panels: torch.Tensor) -> torch.Tensor:
    halves = panels.view(panels.shape[0], -1, PANEL_COLUMNS, 2, 2)
    nibbles = torch.stack((halves << 4, halves & 0xF0), -1).view(torch.int8) >> 4
    return nibbles.permute(0, 2, 1, 4, 5, 3).reshape(panels.shape[0] * PANEL_COLUMNS, -1)


class _Arena:
    """Memory for weights side by side, so that small ones share huge pages; called from several threads."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> torch.Tensor:
        with self._lock:
            if self._free.numel() < num_bytes:
                self._free = huge_zeros([max(num_bytes, _ARENA_BYTES)], torch.uint8)
            taken, self._free = self._free[:num_bytes], self._free[-(-num_bytes // 64) * 64 :]
        return taken


_ARENA = _Arena()

_LIBRARY: Any = torch.library.Library  # not annotated
_OPERATIONS = _LIBRARY("drafthouse", "DEF")
_OPERATIONS.define(
    "quantized_linear(Tensor x, Tensor panels, Tensor scales, Tensor? bias, int num_columns, int bits)"
    " -> Tensor"
)
_OPERATIONS.impl("quantized_linear", quantized_linear, "CompositeExplicitAutograd")
