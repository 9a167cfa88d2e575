"""What the KV pool may take of what is left."""

from __future__ import annotations

import pytest

from specdec.kv.budget import MemoryProfile, budget_of
from specdec.kv.config import CacheConfig

GIB = 1 << 30


def profile(**facts: object) -> MemoryProfile:
    values: dict[str, object] = {
        "device_type": "cpu",
        "available_bytes": 6 * GIB,
        "forward_bytes": GIB,
        "reserved_bytes": GIB,
    }
    return MemoryProfile(**{**values, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "facts", "expected"),
    [
        ({}, {}, 2 * GIB),  # a half of 6 - 1 - 1
        ({}, {"available_bytes": 100 * GIB}, 4 * GIB),  # others use the machine too
        ({"memory_fraction": 0.5}, {"available_bytes": 102 * GIB}, 50 * GIB),  # unless that was asked for
        ({"memory_fraction": 1.0}, {}, 4 * GIB),
        ({}, {"device_type": "cuda", "available_bytes": 82 * GIB}, 72 * GIB),
        ({"memory_fraction": 0.25}, {"device_type": "cuda", "available_bytes": 82 * GIB}, 20 * GIB),
        ({}, {"available_bytes": GIB}, 0),  # never below nothing
        ({}, {"available_bytes": None}, GIB),
        ({}, {"num_sharers": 2}, GIB // 2),  # 6 / 2 - 1 - 1, and a half of it
    ],
)
def test_budget(config: dict[str, float], facts: dict[str, object], expected: int) -> None:
    assert budget_of(CacheConfig(**config), profile(**facts)).num_bytes == expected  # type: ignore[arg-type]


def test_it_says_where_the_number_comes_from() -> None:
    origin = budget_of(CacheConfig(), profile(available_bytes=100 * GIB)).origin
    assert origin.startswith("0.5 of what is left of 102400 MiB after the largest forward (1024 MiB)")
    assert "no more than 4 GiB" in origin
    assert "for 2 ranks" in budget_of(CacheConfig(), profile(num_sharers=2)).origin
