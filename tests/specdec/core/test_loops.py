"""What counts as a loop."""

from __future__ import annotations

import random

import pytest

from specdec.core.loops import ends_in_loop


@pytest.mark.parametrize("period", [1, 2, 7, 32])
def test_a_repeating_tail_is_a_loop(period: int) -> None:
    generator = random.Random(period)
    unit = [generator.randrange(1000) for _ in range(period)]
    assert ends_in_loop([*range(50), *(unit * 64)[:64]])


def test_other_tails_are_none() -> None:
    generator = random.Random(0)
    tokens = [generator.randrange(1000) for _ in range(200)]
    assert not ends_in_loop(tokens)
    assert not ends_in_loop([1] * 63)
    assert not ends_in_loop([*[1] * 63, 2])
    unit = [generator.randrange(1000) for _ in range(33)]
    assert not ends_in_loop(unit * 4)
