"""What a proposal that nobody verified would have been worth."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from specdec.scheduling.speculation.shadow_scores import would_stand
from specdec.verification.answers import verdict_of


@pytest.mark.parametrize(
    ("came", "standing"),
    [((), None), ((5,), None), ((5, 6), None), ((5, 6, 7), 3), ((5, 6, 7, 8), 3), ((4,), 0), ((5, 4), 1)],
)
def test_a_chain(came: Sequence[int], standing: int | None) -> None:
    assert would_stand((5, 6, 7), None, came) == standing


@pytest.mark.parametrize(
    ("came", "standing"), [((5,), None), ((6,), 1), ((5, 8), 2), ((5, 7), 2), ((5, 9), 1), ((9, 5), 0)]
)
def test_a_tree(came: Sequence[int], standing: int | None) -> None:
    """5 with 7 and 8 behind it, or 6."""
    assert would_stand((5, 6, 7, 8), (-1, -1, 0, 0), came) == standing


@pytest.mark.parametrize("seed", range(4))
def test_as_verification_says(seed: int) -> None:
    """Whatever chain: what would stand is what verification accepts, given the target's tokens."""
    rng = random.Random(seed)
    for _ in range(200):
        drafted = tuple(rng.choices(range(2), k=rng.randint(1, 5)))
        came = rng.choices(range(2), k=6)
        accepted = verdict_of(drafted, None, tuple(came[: len(drafted) + 1])).num_accepted
        assert would_stand(drafted, None, came) == accepted
