"""Rows of K and V in 8 bits."""

from __future__ import annotations

import pytest
import torch

from specdec.kv.packed_rows import is_packed, pack_rows, packed_size, unpack_rows


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows whose sizes differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(3)
    sizes = 10.0 ** torch.randint(-6, 7, (*shape[:-1], 1), generator=generator)
    return (torch.randn(*shape, generator=generator) * sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [1, 8, 24, 128])
def test_no_number_is_off_by_more_than_half_a_step(dtype: torch.dtype, head_dim: int) -> None:
    """A step is a 127th of the largest number of the row; what comes back is rounded to the dtype besides."""
    numbers = rows(5, 3, head_dim, dtype=torch.float32).clamp(-6e4, 6e4).to(dtype)
    packed = pack_rows(numbers)
    assert packed.shape == (5, 3, packed_size(head_dim))
    assert is_packed(packed)
    assert not is_packed(numbers)
    unpacked = unpack_rows(packed, dtype)
    assert unpacked.dtype == dtype
    largest = numbers.float().abs().amax(-1, keepdim=True)
    tolerance = largest / 254.0 * 1.0001 + largest * torch.finfo(dtype).eps + torch.finfo(dtype).tiny
    assert ((unpacked.float() - numbers.float()).abs() <= tolerance).all()


def test_packing_what_was_unpacked_changes_nothing() -> None:
    packed = pack_rows(rows(40, 16))
    again = pack_rows(unpack_rows(packed, torch.float32))
    assert torch.equal(packed[..., :16], again[..., :16])


def test_rows_have_scales_of_their_own() -> None:
    """The control of what is said of steps: by one scale for all, the small row would be zeros."""
    numbers = torch.tensor([[1000.0, -3.0], [0.001, -0.0005]])
    torch.testing.assert_close(
        unpack_rows(pack_rows(numbers), torch.float32)[1], numbers[1], rtol=0, atol=1e-5
    )


def test_zeros_and_what_is_nearly_zero() -> None:
    numbers = torch.tensor([[0.0, 0.0], [1e-40, -1e-38]])
    assert torch.equal(unpack_rows(pack_rows(numbers), torch.float32), torch.zeros(2, 2))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_does_not_become_a_number(wrong: float) -> None:
    """Nobody would notice a broken model."""
    numbers = torch.tensor([[1.0, wrong, 2.0], [1.0, 2.0, 3.0]])
    unpacked = unpack_rows(pack_rows(numbers), torch.float32)
    assert unpacked[0].isnan().all()
    assert unpacked[1].isfinite().all()
