"""Which layers of a model are quantized, to what, and the quantization itself, which is torchao's.

Weights only: activations stay what they are. Every linear layer that text goes through is quantized,
symmetrically, to the nearest integer: `int8` with one scale per output, `int4-G` with one for every G inputs
of an output. With 4 bits the layer that yields the logits gets 8: it is where rounding shows most. Embeddings
stay as they are, and so does what a model has for images.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from specdec.core.errors import ConfigError
from specdec.core.extras import how_to_install
from specdec.model.config import INT4_GROUP_SIZES, QuantizationName
from specdec.model.parallel.surgery import complete_like
from specdec.model.quantized_linear import (
    PANEL_COLUMNS,
    Bits,
    QuantizedLinear,
    QuantizedWeight,
    WeightBuilder,
)

EXTRA = "quantization"
"""The extra of our distribution that brings torchao."""

_ROWS_ELEMENTS = 1 << 19
"""How many weights are quantized at a time: fp32 copies of so many are made."""


class UnsupportedQuantization(Exception):
    """The model cannot be quantized as asked; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one layer is quantized."""

    bits: Bits
    group_size: int | None
    """Inputs that share a scale; None: all."""

    def num_groups(self, num_inputs: int) -> int:
        """Scales per output."""
        return 1 if self.group_size is None else num_inputs // self.group_size


ReadRows = Callable[[int, int], torch.Tensor]
"""(first, end) -> rows [end - first, inputs] of a weight, in the dtype that is quantized."""

INT8 = Scheme(bits=8, group_size=None)


def scheme_of(name: QuantizationName) -> Scheme:
    """Return what a configured name means."""
    if name == "int8":
        return INT8
    size = name.removeprefix("int4").removeprefix("-")
    return Scheme(bits=4, group_size=int(size) if size else min(INT4_GROUP_SIZES))


def require_torchao(name: QuantizationName) -> None:
    """Check that torchao is installed.

    Raises:
        ConfigError: it is not; names the extra.
    """
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            f"quantization: {name} needs torchao, which is not installed: {how_to_install(EXTRA)}"
        )


def layers_of(model: torch.nn.Module, scheme: Scheme) -> Iterator[tuple[str, torch.nn.Module, Scheme]]:
    """Yield name, module and scheme of every layer to be quantized."""
    head = _head_of(model)
    for name, module in _text_modules(model):
        if isinstance(module, torch.nn.Linear | Conv1D):
            yield name, module, INT8 if module is head else scheme


def _head_of(model: torch.nn.Module) -> torch.nn.Module:
    hf_model: Any = model
    head: torch.nn.Module = hf_model.get_output_embeddings()
    return head


def _text_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Name and module of all that computes logits from token ids: not a tower for images."""
    hf_model: Any = model
    text = {*hf_model.get_decoder().modules(), _head_of(model)}
    return ((name, module) for name, module in model.named_modules() if module in text)


def check_quantizable(model: torch.nn.Module, name: QuantizationName) -> None:
    """Check that all weights of a model, which may be on the meta device, can be quantized.

    Raises:
        UnsupportedQuantization: naming the first that cannot.
    """
    for module_name, module in _text_modules(model):
        if isinstance(module, torch.nn.Linear | Conv1D | torch.nn.Embedding):
            continue
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                raise UnsupportedQuantization(
                    f"{module_name}.{parameter_name} belongs to a {type(module).__name__}, and only linear "
                    "layers are quantized (experts are none)"
                )
    for layer, module, scheme in layers_of(model, scheme_of(name)):
        _, num_inputs = shape_of(module)
        if num_inputs % 2:
            raise UnsupportedQuantization(f"{layer} has {num_inputs} inputs, an odd number")
        if scheme.group_size is None or num_inputs % scheme.group_size == 0:
            continue
        fitting = [f"int4-{size}" for size in INT4_GROUP_SIZES if num_inputs % size == 0]
        raise UnsupportedQuantization(
            f"{layer} has {num_inputs} inputs, which groups of {scheme.group_size} do not divide; "
            f"{' and '.join([*fitting, 'int8'])} would"
        )


def shape_of(layer: torch.nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    weight: Any = layer.weight
    columns, inputs = weight.shape
    return (inputs, columns) if isinstance(layer, Conv1D) else (columns, inputs)


def quantize(rows: ReadRows, num_columns: int, num_inputs: int, scheme: Scheme) -> QuantizedWeight:
    """Quantize a weight [num_columns, num_inputs], a stretch of its rows at a time."""
    num_groups = scheme.num_groups(num_inputs)
    builder = WeightBuilder(scheme.bits, num_columns, num_inputs, num_groups=num_groups)
    step = max(_ROWS_ELEMENTS // num_inputs // PANEL_COLUMNS, 1) * PANEL_COLUMNS
    for first in range(0, num_columns, step):
        end = min(first + step, num_columns)
        builder.put(first, *_quantized_rows(rows(first, end), scheme))
    return builder.finish()


def _quantized_rows(rows: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 [columns, inputs] and scales [columns, groups], as torchao chooses them."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

    config: Any
    if scheme.group_size is None:
        config = Int8WeightOnlyConfig(set_inductor_config=False)
    else:
        int4: Any = torch.int4  # type: ignore[attr-defined]
        config = IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(scheme.group_size))
    layer = torch.nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(rows, requires_grad=False)
    quantize_(layer, config)
    quantized: Any = layer.weight
    assert quantized.zero_point is None or not quantized.zero_point.any(), "it is symmetric"
    return quantized.qdata, quantized.scale


def _rows_of(matrix: torch.Tensor) -> ReadRows:
    return lambda first, end: matrix[first:end].contiguous()


def replace_layers(
    model: torch.nn.Module, name: QuantizationName, quantized: dict[str, QuantizedWeight]
) -> None:
    """Put quantized layers in the place of all linear ones, one after the other.

    `quantized`: weights by layer that are quantized already; the others are found in the model. Empty
    afterwards.
    """
    for layer, module, scheme in list(layers_of(model, scheme_of(name))):
        anything: Any = module
        weight = quantized.pop(layer, None)
        if weight is None:
            matrix = anything.weight.detach()
            matrix = matrix.t() if isinstance(module, Conv1D) else matrix
            weight = quantize(_rows_of(matrix), *shape_of(module), scheme)
        parent, _, leaf = layer.rpartition(".")
        linear = QuantizedLinear(weight, anything.bias)
        complete_like(linear, module)
        setattr(model.get_submodule(parent), leaf, linear)
        anything.weight = None
