"""Which times of masks end a request."""

from __future__ import annotations

import pytest

from specdec.sampling.mask_times import MaskTimes


@pytest.mark.parametrize(
    ("took_s", "ends"),
    [
        ([0.1, 0.2, 0.25], [False, False, False]),
        ([0.28, 0.01, 0.2], [False, False, False]),
        ([0.28, 0.01, 0.26], [False, False, True]),
        ([0.9, 0.9], [False, True]),
        ([1.01], [True]),
    ],
)
def test_one_slow_mask_is_forgiven_and_no_second(took_s: list[float], ends: list[bool]) -> None:
    times = MaskTimes(0.25)
    assert [times.is_too_long(one) for one in took_s] == ends
