"""Which batches are alike."""

from __future__ import annotations

import pytest

from specdec.scheduling.speculation.batch_sizes import is_as_large, size_class


def test_as_large() -> None:
    assert is_as_large(5, 4)
    assert not is_as_large(6, 4)
    assert not is_as_large(2, 4)


@pytest.mark.parametrize("limit", [1, 2, 4, 8, 16, 64, 128, 256])
def test_a_full_batch_is_of_the_class_of_one_that_is_nearly_full(limit: int) -> None:
    assert 2 ** size_class(limit) == limit
    if limit >= 4:
        assert size_class(limit - 1) == size_class(limit + 1) == size_class(limit)
    assert size_class(2 * limit) == size_class(limit) + 1
