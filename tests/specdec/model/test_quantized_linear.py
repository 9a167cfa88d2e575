"""Quantized linear layers: their layout, and the native kernel against exact sums."""

from __future__ import annotations

import pytest
import torch

from specdec.attention.native import NativeUnavailable, resolve_cache_dir
from specdec.model.native_forward import load_quantized_kernel
from specdec.model.quantization import Scheme, scheme_of
from specdec.model.quantized_linear import (
    PANEL_COLUMNS,
    Bits,
    QuantizedLinear,
    QuantizedWeight,
    WeightBuilder,
)
from tests.specdec.model.lowered_models import VOCAB, Model, Native, lowered

pytestmark = pytest.mark.usefixtures("one_thread_each")
INT8, INT4, INT4_64 = (scheme_of(name) for name in ("int8", "int4", "int4-64"))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def random_weight(
    scheme: Scheme, columns: int, inputs: int, dtype: torch.dtype
) -> tuple[QuantizedWeight, torch.Tensor, torch.Tensor]:
    """A weight of all integers there are, its integers and its scales."""
    largest = 2 ** (scheme.bits - 1)
    values = torch.randint(-largest, largest, (columns, inputs), dtype=torch.int8)
    scales = torch.rand(columns, scheme.num_groups(inputs)) + 0.1
    scales = scales if scheme.group_size is None else scales.to(dtype)
    builder = WeightBuilder(scheme.bits, columns, inputs, num_groups=scales.shape[1])
    for first in range(0, columns, PANEL_COLUMNS):
        rows = slice(first, first + PANEL_COLUMNS)
        builder.put(first, values[rows], scales[rows])
    return builder.finish(), values, scales


def exact(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [columns, inputs]"""
    grouped = values.double().unflatten(1, (scales.shape[1], -1))
    return (grouped * scales.double()[..., None]).flatten(1)


@pytest.mark.parametrize(("scheme", "columns", "inputs"), [(INT8, 70, 34), (INT4, 70, 96), (INT4_64, 1, 64)])
def test_what_is_put_in_comes_out(scheme: Scheme, columns: int, inputs: int) -> None:
    weight, values, scales = random_weight(scheme, columns, inputs, torch.float32)
    assert (weight.num_columns, weight.num_inputs) == (columns, inputs)
    found, found_scales = weight.rows(0, weight.panels.shape[0])
    assert torch.equal(found[:columns], values)
    assert torch.equal(found_scales[:columns], scales)
    assert not found[columns:].any()
    assert weight.panels.nbytes == found.shape[0] * inputs * scheme.bits // 8
    last = weight.panels.shape[0] - 1
    part, _ = weight.rows(last, last + 1)
    assert torch.equal(part, found[last * PANEL_COLUMNS :])


@pytest.mark.parametrize("scheme", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_eager_layer(scheme: Scheme, dtype: torch.dtype) -> None:
    """Whatever the shape of the input, within the rounding of its dtype; see `quantized_linear`."""
    weight, values, scales = random_weight(scheme, 70, 96, dtype)
    bias = torch.nn.Parameter(torch.randn(70).to(dtype), requires_grad=False)
    layer = QuantizedLinear(weight, bias)
    x = torch.randn(2, 3, 96).to(dtype)
    expected = x.double() @ exact(values, scales).t() + bias.double()
    assert layer(x).dtype == dtype
    error = (layer(x).double() - expected).abs().max() / expected.abs().max()
    assert error < 4 * torch.finfo(dtype).eps


# ------------------------------------------------------------------------------------------ the kernel


@pytest.fixture(scope="module")
def _kernel() -> None:
    try:
        load_quantized_kernel(resolve_cache_dir(None))
    except NativeUnavailable as error:
        pytest.skip(f"no kernel here: {error}")


def native_layer(
    weight: QuantizedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[Native, torch.Tensor]:
    """The layer on rows of a table [VOCAB, inputs], and the table."""
    layer = QuantizedLinear(weight, None if bias is None else torch.nn.Parameter(bias, requires_grad=False))
    table = torch.randn(VOCAB, weight.num_inputs).to(dtype)
    return lowered(Model(lambda x, positions: layer(x), table)), table


def native_rows(native: Native, count: int) -> torch.Tensor:
    """The layer's outputs for rows 0 .. count - 1 of the table, in one batch."""
    ids = torch.arange(count)
    return native(ids[None], 0, ids).clone()


SHAPES = [(INT8, 7, 34), (INT8, 100, 330), (INT4, 32, 32), (INT4, 100, 320), (INT4_64, 65, 192)]


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize(("scheme", "columns", "inputs"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_is_as_exact_as_its_output_can_be(
    scheme: Scheme, columns: int, inputs: int, dtype: str
) -> None:
    """Weights are not rounded on the way: only sums (fp32) and, once, the output are.

    The control is the same bound for the weights of another scheme: scales that are off by 2 % show.
    """
    weight, values, scales = random_weight(scheme, columns, inputs, DTYPES[dtype])
    bias = torch.randn(columns).to(DTYPES[dtype])
    native, table = native_layer(weight, bias, DTYPES[dtype])
    expected = table.double() @ exact(values, scales).t() + bias.double()
    for count in (1, 5, 6, 7, 13, 40):
        result = native_rows(native, count).double()
        wanted = expected[:count]
        rounding = 2.0**-8 if dtype == "bf16" else 0.0
        bound = rounding * wanted.abs() + 2e-6 * expected.abs().max()
        assert ((result - wanted).abs() <= bound).all()
        assert not ((result - wanted * 1.02).abs() <= bound).all()


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("scheme", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_gives_a_row_the_same_bits_in_every_batch(scheme: Scheme, dtype: str) -> None:
    weight, _, _ = random_weight(scheme, 130, 256, DTYPES[dtype])
    native, _ = native_layer(weight, None, DTYPES[dtype])
    whole = native_rows(native, 40)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 25, 39):
        assert torch.equal(native_rows(native, count), whole[:count])
    torch.set_num_threads(2)
    for count in (1, 6, 40):
        assert torch.equal(native_rows(native, count), whole[:count])


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_one_copy(bits: Bits) -> None:
    """The compiled forward reads the layer's own memory."""
    scheme = INT8 if bits == 8 else INT4
    weight, _, _ = random_weight(scheme, 64, 64, torch.float32)
    layer = QuantizedLinear(weight, None)
    assert layer.panels.data_ptr() == weight.panels.data_ptr()
    assert weight.num_bytes == 64 * 64 * bits // 8 + weight.scales.nbytes
