"""The door's service without Ray: what its health is, and that its ticks outlive what they meet."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from cluster import client, door_account
from cluster.client import ClusterService
from cluster.config import ClusterConfig
from specdec.transport.config import ChannelConfig
from specdec.transport.messages import MetricsReply


class Directory:
    """A link to no directory at all."""

    def __init__(self, **_: object) -> None:
        self.is_alive = False
        self.silent_s = 0.0

    def announce(self, member: object) -> None:
        """Part of `DirectoryLink`."""

    def start(self) -> None:
        self.is_alive = True

    def close(self) -> None:
        self.is_alive = False


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "DirectoryLink", Directory)
    monkeypatch.setattr(client, "_TICK_S", 0.001)


@contextlib.asynccontextmanager
async def started() -> AsyncIterator[ClusterService]:
    service = ClusterService(ClusterConfig(channels=ChannelConfig(bind="loopback")))
    await service.start()
    try:
        yield service
    finally:
        await service.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.001)


def test_what_fails_once_does_not_end_the_account_of_doors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door_account, "_REPORT_S", 0.001)

    async def run() -> None:
        async with started() as service:
            account = service._account
            num_calls = 0

            async def report_once() -> None:
                nonlocal num_calls
                num_calls += 1
                if num_calls in (2, 3):
                    raise RuntimeError("the channel is gone")

            monkeypatch.setattr(account, "_report_once", report_once)
            await until(lambda: num_calls > 5)

    asyncio.run(run())
    assert caplog.text.count("what doors have counted could not be told") == 1, "once, not every time"


def test_numbers_of_target_groups_that_make_no_sense_are_dropped_and_counted() -> None:
    async def run() -> None:
        async with started() as service:
            good = MetricsReply(1, {"rounds": 3.0})
            bad = MetricsReply(1, {"rounds": 3.0, "no series": 1.0, "queue_wait_seconds": float("nan")})
            assert service._sound(good) == service._sound(bad) == {"rounds": 3.0}
            assert service._book.counters["unexpected_messages_dropped"] == 1

    asyncio.run(run())


def is_healthy(service: ClusterService) -> bool:
    try:
        service.check_health()
    except RuntimeError:
        return False
    return True


def test_a_door_whose_threads_have_ended_is_not_healthy() -> None:
    async def run() -> None:
        async with started() as service:
            assert is_healthy(service)
            directory: Any = service._directory
            directory.is_alive = False
            with pytest.raises(RuntimeError, match="directory's thread"):
                service.check_health()
            directory.is_alive = True
            await asyncio.to_thread(service._pump.close)
            with pytest.raises(RuntimeError, match="channel's thread"):
                service.check_health()

    asyncio.run(run())


def test_a_tick_that_fails_is_told_once_and_followed_by_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        num_to_fail, num_ticks = client._MAX_FAILED_TICKS - 1, 0
        async with started() as service:
            tick = service._book.tick

            def failing(**directory: float) -> None:
                nonlocal num_to_fail, num_ticks
                num_ticks += 1
                if num_to_fail:
                    num_to_fail -= 1
                    raise KeyError("a stream that is gone")
                tick(**directory)

            monkeypatch.setattr(service._book, "tick", failing)
            await until(lambda: num_to_fail == 0 and num_ticks > 2 * client._MAX_FAILED_TICKS)
            assert is_healthy(service)
            num_to_fail = 1 << 40
            await until(lambda: not is_healthy(service))
            with pytest.raises(RuntimeError, match="not looked after"):
                service.check_health()
            num_to_fail = 0
            await until(lambda: is_healthy(service))

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "streams could not be looked after"
    ] * 2


def test_nothing_is_left_of_a_door_that_is_closed() -> None:
    async def run() -> None:
        async with started():
            pass

    before = threading.active_count()
    asyncio.run(run())
    assert threading.active_count() <= before
