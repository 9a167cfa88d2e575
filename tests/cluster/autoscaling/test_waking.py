"""Who wakes a deployment without replicas, and how often."""

from __future__ import annotations

import asyncio

import pytest
from ray.serve.exceptions import RayServeException

from cluster.autoscaling.waking import PoolWaker, waker_of
from cluster.config import DraftPoolConfig


class Method:
    """A deployment handle whose one method is called."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    @property
    def wake(self) -> Method:
        return self

    def remote(self) -> Call:
        self.calls.append(Call())
        return self.calls[-1]


class Call:
    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def config(min_workers: int) -> DraftPoolConfig:
    return DraftPoolConfig.model_validate({"autoscaling": {"min_workers": min_workers, "max_workers": 2}})


def test_the_pool_is_woken_once_per_minute_while_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("cluster.autoscaling.waking.time.monotonic", lambda: now_s)
    pool = Method()
    waker = PoolWaker(pool, config(0))
    waker.consider(is_needed=False)
    assert not pool.calls
    for _ in range(50):
        waker.consider(is_needed=True)
        now_s += 1.0
    assert len(pool.calls) == 1
    now_s += 20.0
    waker.consider(is_needed=True)
    assert [call.is_cancelled for call in pool.calls] == [True, False]


@pytest.mark.parametrize("pool", [config(1), DraftPoolConfig()])
def test_a_pool_that_is_never_empty_is_left_alone(pool: DraftPoolConfig) -> None:
    handle = Method()
    PoolWaker(handle, pool).consider(is_needed=True)
    assert not handle.calls


def test_groups_that_cannot_be_woken_cost_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Method):
        def remote(self) -> Call:
            raise RayServeException("gone")

    asyncio.run(waker_of(Broken())())  # type: ignore[arg-type]
    assert "gone" in caplog.text
