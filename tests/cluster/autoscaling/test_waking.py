"""Who wakes a deployment without replicas, and how often."""

from __future__ import annotations

import asyncio
import threading

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


class Stuck(Method):
    """Its calls wait for Ray's head, which is away."""

    def __init__(self) -> None:
        super().__init__()
        self.is_called, self.is_back = threading.Event(), threading.Event()
        self.num_begun = 0

    def remote(self) -> Call:
        self.num_begun += 1
        self.is_called.set()
        assert self.is_back.wait(30)
        return super().remote()


def nobody() -> None:
    """Who is told that somebody is waited for."""


def consider(waker: PoolWaker, *, is_needed: bool) -> None:
    """Have it called, and be through with it."""
    waker.consider(is_needed=is_needed)
    if waker._calling is not None:
        waker._calling.join(30)


def config(min_workers: int) -> DraftPoolConfig:
    return DraftPoolConfig.model_validate({"autoscaling": {"min_workers": min_workers, "max_workers": 2}})


def test_the_pool_is_woken_once_per_minute_while_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("cluster.autoscaling.waking.time.monotonic", lambda: now_s)
    pool, told = Method(), []
    waker = PoolWaker(pool, config(0), lambda: told.append(len(pool.calls)))
    consider(waker, is_needed=False)
    assert not pool.calls
    for _ in range(50):
        consider(waker, is_needed=True)
        now_s += 1.0
    assert len(pool.calls) == 1
    now_s += 20.0
    consider(waker, is_needed=True)
    assert [call.is_cancelled for call in pool.calls] == [True, False]
    assert told == [1, 2], "Serve asks no policy meanwhile: each call is told"


def test_while_the_head_is_away_no_coordinator_waits_and_one_call_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("cluster.autoscaling.waking.time.monotonic", lambda: now_s)
    pool = Stuck()
    waker = PoolWaker(pool, config(0), nobody)
    waker.consider(is_needed=True)  # would wait for ever
    assert pool.is_called.wait(30)
    now_s += 100.0
    waker.consider(is_needed=True)
    assert pool.num_begun == 1
    pool.is_back.set()
    assert waker._calling is not None
    waker._calling.join(30)
    consider(waker, is_needed=True)
    assert [call.is_cancelled for call in pool.calls] == [True, False]


def test_while_the_head_is_away_a_door_goes_on() -> None:
    class Answered(Stuck):
        def remote(self) -> Call:
            super().remote()
            return asyncio.sleep(0)  # type: ignore[return-value]

    groups, told = Answered(), []

    async def scene() -> None:
        waking = asyncio.ensure_future(waker_of(groups, lambda: told.append("a group"))())
        while not groups.is_called.is_set():  # would never be looked at
            await asyncio.sleep(0)
        groups.is_back.set()
        await waking

    asyncio.run(scene())
    assert groups.num_begun == 1
    assert told == ["a group"]


def test_that_a_group_is_waited_for_is_told_before_it_is_there() -> None:
    """One that finds no place never is."""

    class Unanswered(Method):
        def remote(self) -> Call:
            return asyncio.Event().wait()  # type: ignore[return-value]

    async def scene() -> None:
        told, loop = asyncio.Event(), asyncio.get_running_loop()

        def tell() -> None:
            loop.call_soon_threadsafe(told.set)

        waking = asyncio.ensure_future(waker_of(Unanswered(), tell)())
        await asyncio.wait_for(told.wait(), 30)
        assert not waking.done()
        waking.cancel()

    asyncio.run(scene())


def test_that_a_group_is_waited_for_is_told_again_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a policy decided before may be told behind it, and a directory may begin anew."""
    monkeypatch.setattr("cluster.autoscaling.waking._TELL_AGAIN_S", 0.005)
    num_told = 0

    async def scene() -> None:
        is_there, is_told_again, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

        class Slow(Method):
            def remote(self) -> Call:
                return is_there.wait()  # type: ignore[return-value]

        def tell() -> None:
            nonlocal num_told
            num_told += 1
            if num_told == 2:
                loop.call_soon_threadsafe(is_told_again.set)

        waking = asyncio.ensure_future(waker_of(Slow(), tell)())
        await asyncio.wait_for(is_told_again.wait(), 30)
        is_there.set()
        await waking
        num_until_then = num_told
        await asyncio.sleep(0.05)
        assert num_told == num_until_then

    asyncio.run(scene())


def test_a_door_that_closes_waits_for_no_answer() -> None:
    async def scene() -> None:
        has_begun, is_over = asyncio.Event(), asyncio.Event()

        async def answer() -> None:
            try:
                has_begun.set()
                await asyncio.Event().wait()
            finally:
                is_over.set()

        class Unanswered(Method):
            def remote(self) -> Call:
                return answer()  # type: ignore[return-value]

        waking = asyncio.ensure_future(waker_of(Unanswered(), nobody)())
        await asyncio.wait_for(has_begun.wait(), 30)
        waking.cancel()
        await asyncio.wait_for(is_over.wait(), 30)
        with pytest.raises(asyncio.CancelledError):
            await waking

    asyncio.run(scene())


@pytest.mark.parametrize("pool", [config(1), DraftPoolConfig()])
def test_a_pool_that_is_never_empty_is_left_alone(pool: DraftPoolConfig) -> None:
    handle = Method()
    consider(PoolWaker(handle, pool, nobody), is_needed=True)
    assert not handle.calls


def test_groups_that_cannot_be_woken_cost_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Method):
        def remote(self) -> Call:
            raise RayServeException("gone")

    asyncio.run(waker_of(Broken(), nobody)())
    assert "gone" in caplog.text
