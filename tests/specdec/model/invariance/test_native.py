"""The C++ operations one by one: equal bits for any number and order of rows, and PyTorch's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.nn import functional as F

from specdec.attention.native import NativeUnavailable
from specdec.model.invariance.native import NativeOperations
from specdec.model.invariance.operations import InvariantForward, UnsupportedInvariance

Operation = Callable[[torch.Tensor], torch.Tensor]

WIDTHS = (7, 32, 33, 100, 2050)
MAX_ROWS = 70
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def weight_of(x: torch.Tensor, *shape: int) -> torch.Tensor:
    numbers = np.random.default_rng(x.shape[-1]).standard_normal(shape)  # not an operation of torch
    return torch.from_numpy(numbers).to(x.dtype)


def batched(x: torch.Tensor) -> torch.Tensor:
    """x [rows, width] as products of a batch, of which the rows are the second dimension."""
    return torch.bmm(x[None].expand(3, -1, -1), weight_of(x, 3, x.shape[-1], 5)).transpose(0, 1)


OPERATIONS: dict[str, Operation] = {
    "linear": lambda x: F.linear(x, weight_of(x, 65, x.shape[-1])),
    "linear with bias": lambda x: F.linear(x, weight_of(x, 65, x.shape[-1]), weight_of(x, 65)),
    "addmm": lambda x: torch.addmm(weight_of(x, 40), x, weight_of(x, x.shape[-1], 40)),
    "addmm of a matrix": lambda x: torch.addmm(x[:, :1], x, weight_of(x, x.shape[-1], 3)),
    "mm": lambda x: torch.mm(x, weight_of(x, x.shape[-1], 33)),
    "matmul": lambda x: x[:, None, :] @ weight_of(x, x.shape[-1], 33),
    "bmm": batched,
    "angles": lambda x: (x.flatten()[None, :, None] @ weight_of(x, 1, 1, 3)).view(*x.shape, 3),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "cos": torch.cos,
    "sin": torch.sin,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "square": lambda x: x.pow(2),
    "power": lambda x: (x.abs() + 0.1).pow(1.7),
    "power of tensors": lambda x: torch.pow(x.abs() + 0.1, weight_of(x, x.shape[-1]).abs()),
    "softmax": lambda x: x.softmax(-1),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum(-1),
    "layer norm": lambda x: F.layer_norm(
        x, x.shape[-1:], weight_of(x, x.shape[-1]), weight_of(x, x.shape[-1])
    ),
    "rms norm": lambda x: F.rms_norm(x, x.shape[-1:], weight_of(x, x.shape[-1]), 1e-6),
}


@pytest.fixture(scope="module")
def forward() -> InvariantForward:
    try:
        return InvariantForward(NativeOperations())
    except NativeUnavailable as error:
        pytest.skip(f"no C++ kernels here: {error}")


@pytest.fixture(autouse=True, params=[1, 3], ids=["1 thread", "3 threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(MAX_ROWS, width, generator=torch.Generator().manual_seed(width)).mul(2).to(dtype)


@torch.inference_mode()
def run(mode: InvariantForward | None, operation: Operation, x: torch.Tensor) -> torch.Tensor:
    if mode is None:
        return operation(x)
    with mode:
        return operation(x)


def depends_on_the_batch(
    mode: InvariantForward | None, operation: Operation, x: torch.Tensor, order: list[int]
) -> bool:
    """Whether the rows `order` of `x` alone, in this order, are not what they are among all."""
    everything = run(mode, operation, x)
    return not torch.equal(run(mode, operation, x[order].clone()), everything[order])


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_any_rows_in_any_order(forward: InvariantForward, name: str, dtype: str) -> None:
    operation = OPERATIONS[name]
    for width in WIDTHS:
        x = rows(width, DTYPES[dtype])
        everything = run(forward, operation, x)
        for number in range(1, MAX_ROWS + 1):
            order = torch.randperm(MAX_ROWS)[:number]
            assert torch.equal(run(forward, operation, x[order]), everything[order]), (width, number)


@hypothesis.given(
    width=st.integers(1, 300),
    order=st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=MAX_ROWS),
    name=st.sampled_from(sorted(OPERATIONS)),
    dtype=st.sampled_from(sorted(DTYPES)),
)
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_any_shape(forward: InvariantForward, width: int, order: list[int], name: str, dtype: str) -> None:
    assert not depends_on_the_batch(forward, OPERATIONS[name], rows(width, DTYPES[dtype]), order)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_are_pytorchs(forward: InvariantForward, name: str, dtype: str) -> None:
    for width in WIDTHS:
        x = rows(width, DTYPES[dtype])
        expected = run(None, OPERATIONS[name], x.double())
        got = run(forward, OPERATIONS[name], x)
        assert got.dtype == x.dtype
        assert got.shape == expected.shape
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[x.dtype], width


@pytest.mark.parametrize("name", ["linear", "silu", "sigmoid", "gelu tanh"])
def test_control_pytorchs_own_depend_on_the_batch(name: str) -> None:
    orders = [[number] for number in range(MAX_ROWS)]
    assert any(
        depends_on_the_batch(None, OPERATIONS[name], rows(width, torch.float32), order)
        for width in (*WIDTHS, 48, 1000)
        for order in orders
    )


def test_nothing_stays_nothing_and_nan_stays_nan(forward: InvariantForward) -> None:
    x = rows(33, torch.float32)
    assert run(forward, OPERATIONS["linear"], x[:0]).shape == (0, 65)
    assert run(forward, OPERATIONS["silu"], x[:0]).shape == (0, 33)
    x[3, 5] = float("nan")
    for name in ("linear", "silu", "softmax", "layer norm", "mean"):
        got = run(forward, OPERATIONS[name], x)
        assert got[3].isnan().any()
        assert got[torch.arange(MAX_ROWS) != 3].isfinite().all()


@pytest.mark.parametrize(
    ("what", "operation"),
    [
        ("aten.cumsum", lambda x: x.cumsum(-1)),
        ("aten.logsumexp", lambda x: x.logsumexp(-1)),
        ("aten.einsum", lambda x: torch.einsum("ij,kj->ik", x, x)),
        ("sum over", lambda x: x.sum(0)),
        ("mean over", lambda x: x.mean((0, 1))),
        ("softmax over", lambda x: x.softmax(0)),
        ("float64", lambda x: F.linear(x.double(), x.double())),
        ("float16", lambda x: x.half().tanh()),
        ("alpha", lambda x: torch.add(x, x, alpha=2)),
    ],
)
def test_what_has_no_such_form_is_named(forward: InvariantForward, what: str, operation: Operation) -> None:
    with pytest.raises(UnsupportedInvariance, match=what):
        run(forward, operation, rows(7, torch.float32))
