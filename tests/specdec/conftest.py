"""Processes that tests of several ranks share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.rank_pool import BreakablePools, Pools, RankProcesses


@pytest.fixture(scope="session")
def rank_processes() -> Iterator[RankProcesses]:
    with contextlib.closing(RankProcesses()) as processes:
        yield processes


@pytest.fixture(scope="session")
def rank_pool(rank_processes: RankProcesses) -> Pools:
    """Returns the pool of so many ranks, started when it is first asked for."""
    return rank_processes.pool


@pytest.fixture(scope="session")
def breakable_pool(rank_processes: RankProcesses) -> BreakablePools:
    """Opens a pool that a test may do anything to, kill its ranks included."""
    return rank_processes.breakable_pool
