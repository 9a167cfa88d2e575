"""Processes that tests of tensor parallelism share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int], RankPool]]:
    """Returns the pool of so many ranks, started when it is first asked for."""
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()
