"""Which pauses are forgiven."""

from __future__ import annotations

import pytest

from cluster.standstill import Standstill


@pytest.mark.parametrize(
    ("ordinary_s", "lease_s", "looks_s", "forgiven_s"),
    [
        (0.0, 6.0, (100.0, 104.0), 0.0),
        (0.0, 6.0, (100.0, 104.1), 4.1),
        (1.0, 6.0, (100.0, 104.1, 104.6), 0.0),
        (1.0, 0.9, (100.0, 100.9), 0.0),
        (1.0, 0.9, (100.0, 101.5), 1.5),
    ],
    ids=["within two thirds", "beyond", "once", "ordinary for who looks", "not ordinary"],
)
def test_a_time_without_a_look_is_forgiven_once(
    ordinary_s: float, lease_s: float, looks_s: tuple[float, ...], forgiven_s: float
) -> None:
    standstill = Standstill(ordinary_s=ordinary_s)
    assert standstill.forgiven_s(looks_s[0], lease_s) == 0.0, "nobody could be silent before the first"
    for look_s in looks_s[1:-1]:
        standstill.forgiven_s(look_s, lease_s)
    assert standstill.forgiven_s(looks_s[-1], lease_s) == pytest.approx(forgiven_s)
