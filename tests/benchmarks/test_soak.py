"""The arithmetic of the soak, and that its requests are such as the door takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import (
    Reading,
    draw_visits,
    growth_kb_per_request,
    growth_mb,
    headlines,
    resident_bytes,
)
from deploy.openai.protocol import CompletionBody

MIB = 1 << 20
TEXTS = [f"text number {number} " * 30 for number in range(5)]


def readings(*resident_mib: float) -> list[Reading]:
    return [
        Reading(num_requests=1000 + 100 * index, resident_bytes=int(mib * MIB), num_objects=5000 + index)
        for index, mib in enumerate(resident_mib)
    ]


def test_growth_is_of_the_last_quarter_over_the_first() -> None:
    assert growth_mb(readings(500, 501, 900, 100, 510, 503, 508, 509)) == pytest.approx(8.0)
    assert growth_mb(readings(500, 490)) == pytest.approx(-10.0)
    assert growth_mb(readings(500)) == 0.0


def test_a_steady_leak_shows_as_its_slope() -> None:
    leaking = readings(*(500 + 0.1 * index for index in range(20)))  # 0.1 MiB per 100 requests
    assert growth_kb_per_request(leaking) == pytest.approx(1.024, rel=1e-3)
    assert growth_kb_per_request(readings(500, 500, 500)) == 0.0


def test_headlines() -> None:
    numbers = headlines({"readings": readings(500, 500, 500, 503)})
    assert numbers["soak_growth_mb"] == pytest.approx(3.0)
    assert numbers["soak_new_objects"] == 3
    assert numbers["soak_requests"] == 1300


def test_visits_are_repeatable_and_of_every_kind() -> None:
    visits = draw_visits(TEXTS, 2000, seed=1)
    assert visits == draw_visits(TEXTS, 2000, seed=1)
    assert visits != draw_visits(TEXTS, 2000, seed=2)
    for visit in visits:
        CompletionBody.model_validate(visit.body)
        assert visit.leaves_after_s is None or visit.body["stream"]
    assert 40 < sum(visit.leaves_after_s is not None for visit in visits) < 300
    assert 40 < sum("timeout_s" in visit.body for visit in visits) < 200
    assert {visit.body["n"] for visit in visits} == {1, 2, 3}
    assert {visit.body["priority"] for visit in visits} == {-1, 0, 1}


def test_resident_memory_is_read(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name: x\nVmHWM: 99 kB\nVmRSS:\t 2048 kB\n")
    assert resident_bytes(status) == 2 * MIB
    status.write_text("Name: x\n")
    with pytest.raises(OSError, match="VmRSS"):
        resident_bytes(status)
