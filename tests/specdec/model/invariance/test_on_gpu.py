"""The Triton kernels of batch-invariant forwards under Triton's interpreter, and what is decided around them.

On a GPU the same operations run compiled, in tests/gpu, and forwards of models too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from specdec.attention.triton import TritonUnavailable
from specdec.model.invariance import on_gpu
from specdec.model.invariance.on_gpu import GpuOperations
from specdec.model.invariance.operations import InvariantForward, UnsupportedInvariance
from tests.architectures import VOCAB_SIZE, make_model
from tests.specdec.model.invariance.operations_on_gpu import (
    OPERATIONS,
    TOLERANCE,
    Operation,
    relative_error,
    rows,
    run,
)
from tests.triton_interpreter import needs_interpreter

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def forward() -> InvariantForward:
    return InvariantForward(GpuOperations(CPU))


@needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_are_pytorchs(forward: InvariantForward, name: str, dtype: torch.dtype) -> None:
    for num_rows, width in ((1, 7), (3, 64), (70, 33), (18, 300)):
        error = relative_error(forward, OPERATIONS[name], rows(num_rows, width, dtype))
        assert error < TOLERANCE[dtype], (num_rows, width)


@needs_interpreter
@pytest.mark.parametrize("name", ["mean", "sum", "softmax", "layer norm", "rms norm"])
def test_rows_are_programs_of_their_own(forward: InvariantForward, name: str) -> None:
    x = rows(70, 300, torch.float32)
    everything = run(forward, OPERATIONS[name], x)
    for number in (1, 2, 31, 69):
        order = torch.randperm(70)[:number]
        assert torch.equal(run(forward, OPERATIONS[name], x[order]), everything[order])


@needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_products_of_rows_in_any_company(forward: InvariantForward, dtype: torch.dtype) -> None:
    """The interpreter multiplies tiles with numpy, so rows keep their place in a tile here; on a GPU any."""
    tile = on_gpu._TILES[dtype].rows
    x = rows(3 * tile, 300, dtype)
    everything = run(forward, OPERATIONS["linear"], x)
    for first, end in ((0, 1), (0, 5), (tile, tile + 3), (tile, 3 * tile), (2 * tile, 2 * tile + tile // 2)):
        assert torch.equal(run(forward, OPERATIONS["linear"], x[first:end].clone()), everything[first:end])


@needs_interpreter
def test_tiles_do_not_follow_the_batch(forward: InvariantForward, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel is compiled for is the same for every number of rows."""
    launches = []

    def launch(kernel: object, grid: object, *args: object, **constants: object) -> None:
        launches.append(constants)

    monkeypatch.setattr(on_gpu, "launch", launch)
    for num_rows in range(1, 300, 13):
        run(forward, OPERATIONS["linear"], rows(num_rows, 128, torch.bfloat16))
    assert len(launches) == 23
    assert all(constants == launches[0] for constants in launches)


@needs_interpreter
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "mixtral", "falcon"])
def test_models_compute_the_same(forward: InvariantForward, architecture: str) -> None:
    model = make_model(architecture)
    if architecture == "mixtral":
        model.set_experts_implementation("eager")
    input_ids = torch.arange(6)[None] * 7 % VOCAB_SIZE

    def logits(ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return found

    expected = run(None, logits, input_ids)
    got = run(_Lenient(forward.operations), logits, input_ids)
    assert (got - expected).abs().max() / expected.abs().max() < 1e-4


class _Lenient(InvariantForward):
    """Lets in what transformers' own attention and masks use, which the engine replaces."""

    def _replacement(self, func: object, kwargs: object) -> Any:
        return self._known.get(func)


@needs_interpreter
def test_nothing_stays_nothing(forward: InvariantForward) -> None:
    for name, operation in OPERATIONS.items():
        assert run(forward, operation, rows(0, 33, torch.float32)).shape[0] == 0, name


@needs_interpreter
@pytest.mark.parametrize(
    ("what", "operation"),
    [
        ("aten.cumsum", lambda x: x.cumsum(-1)),
        ("sum over", lambda x: x.sum(0)),
        ("float64", lambda x: F.linear(x.double(), x.double())),
        ("rows of 70000", lambda x: x.expand(2, 70000).softmax(-1)),
    ],
)
def test_what_has_no_such_form_is_named(forward: InvariantForward, what: str, operation: Operation) -> None:
    with pytest.raises(UnsupportedInvariance, match=what):
        run(forward, operation, rows(2, 1, torch.float32))


def test_a_cpu_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(TritonUnavailable, match="not on cpu"):
        GpuOperations(CPU)
