import errno
import gc
import mmap

import pytest
import torch

from specdec.kv.huge_pages import huge_zeros


@pytest.mark.parametrize("shape", [(3, 5), (1000, 2, 16, 40), (0, 4)], ids=["small", "large", "empty"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_zeros_of_any_size(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = huge_zeros(shape, dtype)
    assert tensor.shape == shape
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()
    assert not tensor.count_nonzero()


class _WithoutHugePages(mmap.mmap):
    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_a_system_without_huge_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real-time kernels have none."""
    monkeypatch.setattr(mmap, "mmap", _WithoutHugePages)
    tensor = huge_zeros((1 << 20,), torch.float32)
    assert tensor.shape == (1 << 20,)
    assert not tensor.count_nonzero()


def test_the_memory_lives_as_long_as_any_view() -> None:
    view = huge_zeros((1 << 20,), torch.float32)[5:7]
    gc.collect()
    view += 3
    assert view.tolist() == [3, 3]
    assert huge_zeros((1 << 20,), torch.float32)[5:7].tolist() == [0, 0], "each has memory of its own"
