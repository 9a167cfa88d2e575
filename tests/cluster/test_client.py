"""The door's service without Ray: what its health is, and that its ticks outlive what they meet."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from cluster import client, door_account
from cluster.autoscaling import wanted
from cluster.client import ClusterService
from cluster.config import ClusterConfig
from cluster.directory import Member
from specdec.core.description import TargetDescription
from specdec.core.errors import RequestFailed
from specdec.core.request import Resumption
from specdec.transport.base import Envelope, PeerAddress, PeerId
from specdec.transport.config import ChannelConfig
from specdec.transport.messages import MetricsReply, Pong, Welcome
from tests.cluster.absent_directory import Directory
from tests.cluster.simulation import a_request

DESCRIPTION = TargetDescription(
    model_id="toy",
    revision="0123456789abcdef",
    dtype="float32",
    vocab_size=16,
    max_model_len=256,
    eos_token_ids=(0,),
    num_blocks=64,
    block_size=16,
)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "DirectoryLink", Directory)
    monkeypatch.setattr(wanted, "find_directory", lambda namespace: None)
    monkeypatch.setattr(client, "_TICK_S", 0.001)


@contextlib.asynccontextmanager
async def started(
    wake: Callable[[], Awaitable[None]] | None = None, **cluster: object
) -> AsyncIterator[ClusterService]:
    config = ClusterConfig.model_validate({"channels": ChannelConfig(bind="loopback"), **cluster})
    service = ClusterService(config, wake=wake)
    await service.start()
    try:
        yield service
    finally:
        await service.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.001)


async def ticks(service: ClusterService, number: int) -> None:
    """Wait for so many whole ticks."""
    nonce = service._book._next_nonce + number
    await until(lambda: service._book._next_nonce > nonce)


class Groups:
    """The target groups' deployment: its calls wait until a group is there."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.is_there = asyncio.Event()

    async def wake(self) -> None:
        self.num_calls += 1
        await self.is_there.wait()

    def come(self, service: ClusterService) -> None:
        """One starts, and introduces itself to a door."""
        address = PeerAddress(
            peer_id=PeerId("coordinator"), endpoint="tcp://127.0.0.1:9", public_key="nobody's"
        )
        service._book.set_coordinators([Member(address=address, role="coordinator")])
        service._book.hear(Envelope(sender=address.peer_id, message=Welcome(1, DESCRIPTION)))
        self.is_there.set()

    def go(self, service: ClusterService) -> None:
        """It is stopped."""
        service._book.set_coordinators([])
        self.is_there.clear()


def test_a_door_that_is_opened_where_there_is_no_group_has_one_started_to_know_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until it knows, it refuses every request, so that none could wait for one. Then only requests count."""
    monkeypatch.setattr(client, "_WAKE_AGAIN_S", 0.0)

    async def run() -> None:
        groups = Groups()
        async with started(groups.wake) as service:
            await ticks(service, 5)
            assert groups.num_calls == 0, "the directory has not said who is there"
            service._follow(())
            await until(lambda: groups.num_calls == 1)
            await ticks(service, 5)
            assert groups.num_calls == 1, "this call waits for one that loads"
            groups.come(service)
            await ticks(service, 5)
            groups.go(service)
            assert service.description() == DESCRIPTION
            await ticks(service, 20)
            assert groups.num_calls == 1, "nobody asks for anything, and the model is known"
            request = asyncio.create_task(first_output(service))
            await until(lambda: groups.num_calls == 2)
            request.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await request

    async def first_output(service: ClusterService) -> None:
        async for _ in service.generate(a_request("r", random.Random(1))):
            return

    asyncio.run(run())


def test_a_group_that_is_about_to_go_has_a_successor_started_while_it_serves() -> None:
    """Scaled to zero, it serves for a while what comes: what lasts longer would wait for a whole start."""

    async def run() -> None:
        groups = Groups()
        async with started(groups.wake) as service:
            groups.come(service)
            groups.is_there.clear()
            (member,) = (one.member for one in service._book._coordinators)
            service._connected = {member.peer_id: member}
            service._has_seen_members.set()
            request = asyncio.create_task(first_output(service))
            await ticks(service, 5)
            assert groups.num_calls == 0
            service._connected = {member.peer_id: msgspec.structs.replace(member, is_leaving=True)}
            await until(lambda: groups.num_calls == 1)
            request.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await request
            await ticks(service, 5)
            assert groups.num_calls == 1

    async def first_output(service: ClusterService) -> None:
        async for _ in service.generate(a_request("r", random.Random(1))):
            return

    asyncio.run(run())


def test_metrics_say_whether_somebody_has_to_be_there_and_how_many_wait() -> None:
    """Alerts tell a cluster at rest from one that is lost by it."""

    async def run() -> None:
        groups = Groups()
        zero = {
            "target_groups": {"autoscaling": {"min_groups": 0, "max_groups": 2}},
            "draft_pool": {"autoscaling": {"min_workers": 0, "max_workers": 2}},
        }
        async with started(groups.wake, **zero) as service:
            groups.come(service)
            lost = Envelope(sender=PeerId("coordinator"), message=Pong(0, (), without_target=True))
            service._book.hear(lost)
            values = await service.metrics()
            assert (values["coordinators"], values["coordinators_with_target"]) == (1, 0)
            groups.go(service)
            values = await service.metrics()
            parts = [values[f'scales_to_zero{{part="{part}"}}'] for part in ("target", "draft")]
            assert (values["coordinators"], values["num_requests_without_group"], parts) == (0, 0, [1, 1])
            assert (values["coordinators_with_target"], values["target_groups_wanted"]) == (0, 0)
            service._wanted.take({"target": 2, "draft": 1})
            assert (await service.metrics())["target_groups_wanted"] == 2
            assert "draft_workers_wanted" not in values, "nobody has said that there is a pool"
            request = asyncio.create_task(first_output(service))
            await until(lambda: service._book.num_homeless == 1)
            assert (await service.metrics())["num_requests_without_group"] == 1
            request.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await request
            assert (await service.metrics())["num_requests_without_group"] == 0
        async with started() as service:
            values = await service.metrics()
            parts = [values[f'scales_to_zero{{part="{part}"}}'] for part in ("target", "draft")]
            assert parts == [0, 0]
            assert values["target_groups_wanted"] == 1, "as configured"

    async def first_output(service: ClusterService) -> None:
        async for _ in service.generate(a_request("r", random.Random(1))):
            return

    asyncio.run(run())


def test_calls_for_a_group_that_bring_none_are_not_made_in_every_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve may have nothing to start, or say so at once."""

    async def run() -> None:
        groups = Groups()
        groups.is_there.set()
        async with started(groups.wake) as service:
            service._follow(())
            await ticks(service, 20)
            assert groups.num_calls == 1
            monkeypatch.setattr(client, "_WAKE_AGAIN_S", 0.0)
            await until(lambda: groups.num_calls > 2)

    asyncio.run(run())


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


def test_what_a_door_drops_is_in_its_report() -> None:
    key = 'channel_messages_dropped{dropped_by="ingress",reason="%s"}'

    async def run() -> None:
        async with started() as service:
            assert key % "unknown_peer" not in service._report().counters
            service._pump.send(PeerId("nobody"), Pong(1, ()))
            await until(lambda: service._channel.counters.dropped["unknown_peer"] == 1)
            assert service._report().counters[key % "unknown_peer"] == 1
            assert (await service.metrics())[key % "unknown_peer"] == 1

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


def test_a_client_that_comes_back_to_what_killed_its_servers_is_told_so() -> None:
    resumption = Resumption(name="cmpl-ab-0", proof=b"mine", window_s=60.0)

    async def run() -> None:
        async with started() as service:
            service._book._failed.keep(resumption)
            with pytest.raises(RequestFailed, match="lost each time"):
                await service.recall(["cmpl-ab-1"], b"mine")
            assert await service.recall(["cmpl-ab-1"], b"other") == []

    asyncio.run(run())


def test_a_door_knows_how_many_are_beside_it() -> None:
    """They share the limits of API keys, those to a former target too, which still serve."""

    def door(name: str, generation: str = "") -> Member:
        address = PeerAddress(peer_id=PeerId(name), endpoint="tcp://127.0.0.1:9", public_key=name)
        # Younger than this one, or of a generation from before it, which so speaks to none of them.
        since = 0.0 if generation else math.inf
        return Member(address=address, role="ingress", generation=generation, since=since)

    async def run() -> None:
        async with started() as service:
            assert service.num_doors == 1
            service._follow((door("a"), door("b"), door("c", "of another target")))
            assert service.num_doors == 4
            service._follow((door("b"),))
            assert service.num_doors == 2
            service._follow(())
            assert service.num_doors == 1, "this one is there, whatever the directory says"

    asyncio.run(run())
