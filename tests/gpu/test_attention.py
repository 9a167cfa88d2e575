"""The Triton attention compiled for a GPU: the suite of all backends, and what only real kernels can show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch

from specdec.attention.base import AttentionBackend
from specdec.attention.sdpa import SdpaAttention
from specdec.attention.triton import TritonPagedAttention
from tests.specdec.attention.contract import DTYPES, AttentionContract, Shapes, attend, make_case

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
MANY: Shapes = [(5, 1400), (1, 3000), (1, 511), (5, 508), (9, 40), (200, 700), (1, 0), (128, 2000), (33, 5)]


class TestTriton(AttentionContract):
    """Rows are bitwise equal in any company: the interpreter cannot show that."""

    device: ClassVar[torch.device] = CUDA
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
    paths_are_bitwise = False

    def make_backend(self) -> AttentionBackend:
        return TritonPagedAttention(CUDA, max_context=4096)

    @DTYPES
    def test_a_large_batch(self, backend: AttentionBackend, dtype: torch.dtype) -> None:
        self.check(backend, make_case(MANY, dtype=dtype, heads=(32, 8), head_dim=128))

    @DTYPES
    def test_every_row_of_a_large_batch_is_what_it_is_alone(
        self, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        case = make_case(MANY, dtype=dtype, heads=(32, 8), head_dim=128).on(CUDA)
        output, *_ = attend(backend, case)
        first = 0
        for number, (rows, _) in enumerate(MANY):
            assert torch.equal(attend(backend, case.only(number))[0], output[first : first + rows])
            first += rows

    def test_twice_the_same(self, backend: AttentionBackend) -> None:
        case = make_case(MANY, dtype=torch.bfloat16, heads=(32, 8), head_dim=128).on(CUDA)
        assert torch.equal(attend(backend, case)[0], attend(backend, case)[0])


class TestInvariantTriton(TestTriton):
    """As `batch_invariant` has it: nodes of trees are bitwise what they are in chains."""

    paths_are_bitwise = True

    def make_backend(self) -> AttentionBackend:
        return TritonPagedAttention(CUDA, max_context=4096, batch_invariant=True)


def test_a_very_long_context() -> None:
    backend = TritonPagedAttention(CUDA, max_context=131072)
    case = make_case([(5, 100_000), (1, 4096)], dtype=torch.bfloat16, heads=(8, 2), head_dim=128)
    on_gpu = case.on(CUDA)
    expected, *_ = attend(SdpaAttention(), on_gpu)
    torch.testing.assert_close(attend(backend, on_gpu)[0], expected, rtol=2e-2, atol=2e-3)
