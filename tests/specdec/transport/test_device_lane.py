"""Device lanes with Gloo in NCCL's place: what goes by them, and peers that die, hang, or do otherwise."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch

from specdec.core.errors import ChannelTimeout, ConfigError, ProtocolError
from specdec.transport.base import PeerId, PeerLost
from specdec.transport.device_lane import DeviceLane, DeviceLanes, Pipe, Shipment, Transfer
from specdec.transport.gloo_link import FrameKind, TorchDistOptions
from specdec.transport.messages import Fatal, Ping, encode
from specdec.transport.nccl import nccl_lanes
from specdec.transport.parcels import ParcelHead
from specdec.transport.torch_dist import TorchDistChannel
from tests.specdec.transport.echo_peer import echo_process
from tests.specdec.transport.gloo_pipe import GlooPipe, gloo_lanes
from tests.specdec.transport.tensor_exchange import CLIENT, ECHO, SERVER, exchange_tensors, until_lost

HASTY = TorchDistOptions(heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0)


@contextmanager
def channels(*made: TorchDistChannel) -> Iterator[None]:
    try:
        yield
    finally:
        for channel in made:
            channel.close()


@contextmanager
def linked(
    at_server: DeviceLanes | None, at_client: DeviceLanes | None, options: TorchDistOptions = HASTY
) -> Iterator[tuple[TorchDistChannel, TorchDistChannel]]:
    server = TorchDistChannel(SERVER, options=options, lanes=at_server)
    client = TorchDistChannel(CLIENT, options=options, lanes=at_client)
    with channels(server, client):
        server.admit([client.address])
        client.connect(server.address)
        client.send(SERVER, Ping(0))
        assert server.receive(20).message == Ping(0)
        until(lambda: client._links[SERVER].link is not None)  # before, tensors go by the host
        yield server, client


def lane_of(channel: TorchDistChannel) -> DeviceLane | None:
    """Of the link that the channel has opened."""
    link = channel._links[SERVER].link
    assert link is not None
    return link.lane


def pipe_of(channel: TorchDistChannel, peer: PeerId) -> GlooPipe:
    dialled = channel._links.get(peer)
    link = channel._callers[peer] if dialled is None else dialled.link
    assert link is not None
    assert link.lane is not None
    pipe = link.lane._pipe
    assert isinstance(pipe, GlooPipe)
    return pipe


def test_tensors_go_by_the_lane_and_everything_else_by_the_link() -> None:
    with linked(gloo_lanes("1"), gloo_lanes("2")) as (server, client):
        exchange_tensors(server, client)
        assert pipe_of(server, CLIENT).num_received_bytes > 40_000 * 48 * 2
        assert pipe_of(client, SERVER).num_received_bytes < 200


@pytest.mark.parametrize(
    ("at_server", "at_client"),
    [
        (gloo_lanes("1"), None),
        (None, gloo_lanes("1")),
        (gloo_lanes("1"), gloo_lanes("1")),
        (gloo_lanes("1"), gloo_lanes("2", backend="another")),
    ],
    ids=["no lanes at the client", "no lanes at the server", "one device", "another backend"],
)
def test_ends_that_cannot_have_a_lane_have_gloo(
    at_server: DeviceLanes | None, at_client: DeviceLanes | None
) -> None:
    with linked(at_server, at_client) as (server, client):
        assert lane_of(client) is None
        exchange_tensors(server, client)
        assert server.counters.dropped == client.counters.dropped == {}


def test_nothing_is_sent_by_another_way_where_nccl_alone_may_be_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = TorchDistChannel(SERVER, lanes=gloo_lanes("same", wanted="nccl"))
    client = TorchDistChannel(CLIENT, lanes=gloo_lanes("same"))
    with channels(server, client):
        server.admit([client.address])
        client.connect(server.address)
        client.send(SERVER, Ping(1))
        until(lambda: server.counters.dropped["refused_link"] > 1)
        with pytest.raises(ChannelTimeout):
            server.receive(0)
    said = [one.getMessage() for one in caplog.records if "cluster.channels.tensors" in one.getMessage()]
    assert len(said) == 1, "once, however often it knocks"
    assert "both are on the GPU same" in said[0]


@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_a_lane_that_cannot_be_opened_is_done_without(fault: str) -> None:
    """At one end alone: both have Gloo then, and the pipe of the other end is no more."""
    options = TorchDistOptions(lane_timeout_s=1.0)
    opened: list[GlooPipe] = []

    def note(pipe: GlooPipe) -> GlooPipe:
        opened.append(pipe)
        return pipe

    over = threading.Event()

    def fail(pipe: GlooPipe) -> GlooPipe:
        if fault == "hangs":
            over.wait(20)
            return pipe
        raise RuntimeError("no peer-to-peer access")

    with linked(gloo_lanes("1", wrap=note), gloo_lanes("2", wrap=fail), options) as (server, client):
        over.set()
        assert lane_of(client) is None
        exchange_tensors(server, client)
        assert server.counters.dropped == {"no_lane": 1}
        assert [one.is_aborted for one in opened] == [True]


def test_where_nccl_alone_may_be_used_a_lane_that_cannot_be_opened_leaves_no_link() -> None:
    def fail(_: GlooPipe) -> GlooPipe:
        raise RuntimeError("no peer-to-peer access")

    server = TorchDistChannel(SERVER, lanes=gloo_lanes("1", wanted="nccl"))
    client = TorchDistChannel(CLIENT, lanes=gloo_lanes("2", wanted="nccl", wrap=fail))
    with channels(server, client):
        server.admit([client.address])
        client.connect(server.address)
        client.send_tensors(SERVER, Ping(1), {"x": torch.ones(3)})
        with pytest.raises(ChannelTimeout):
            server.receive(1.5)


def test_more_than_the_bound_is_an_error_at_its_sender() -> None:
    options = TorchDistOptions(max_parcel_bytes=10_000)
    with (
        linked(gloo_lanes("1"), gloo_lanes("2"), options) as (_, client),
        pytest.raises(ProtocolError, match="exceed"),
    ):
        client.send_tensors(SERVER, Ping(1), {"x": torch.zeros(10_000)})


def test_a_message_over_the_bound_is_an_error_at_its_sender_with_tensors_too() -> None:
    options = TorchDistOptions(max_message_bytes=1000)
    with (
        linked(gloo_lanes("1"), gloo_lanes("2"), options) as (server, client),
        pytest.raises(ProtocolError, match="exceeds"),
    ):
        client.send_tensors(SERVER, Fatal("x" * 2000), {"x": torch.zeros(3)})
    assert server.counters.dropped == {}


def test_what_the_peer_does_not_take_is_not_heaped_up_on_the_device() -> None:
    options = TorchDistOptions(max_parcel_bytes=10_000, heartbeat_timeout_s=30.0)
    with linked(gloo_lanes("1"), gloo_lanes("2", wrap=Stuck), options) as (_, client):
        for _ in range(5):
            client.send_tensors(SERVER, Ping(1), {"x": torch.zeros(1000)})
        assert client.counters.dropped == {"full": 3}


class Stuck(GlooPipe):
    """Does not send what it is given, as NCCL does whose peer does not take part."""

    def __init__(self, pipe: GlooPipe) -> None:
        super().__init__(pipe._groups, pipe._rank)  # type: ignore[arg-type]

    def send(self, flat: torch.Tensor) -> Transfer:
        return NeverSent(self)


class NeverSent:
    def __init__(self, pipe: Stuck) -> None:
        self._pipe = pipe

    def wait(self, patience: timedelta) -> None:
        until_s = time.monotonic() + patience.total_seconds()
        while time.monotonic() < until_s and not self._pipe.is_aborted:
            time.sleep(0.01)
        raise RuntimeError("never")


def test_bytes_that_do_not_come_break_the_link_at_both_ends_and_it_is_opened_again() -> None:
    stuck_once: list[Pipe] = []

    def first_is_stuck(pipe: GlooPipe) -> Pipe:
        stuck_once.append(Stuck(pipe) if not stuck_once else pipe)
        return stuck_once[-1]

    with linked(gloo_lanes("1"), gloo_lanes("2", wrap=first_is_stuck)) as (server, client):
        started_s = time.monotonic()
        client.send_tensors(SERVER, Ping(1), {"x": torch.ones(3)})
        assert until_lost(client) == PeerLost()
        assert time.monotonic() - started_s < 3 * HASTY.heartbeat_timeout_s
        until(lambda: client.counters.dropped["lane_broken"] + server.counters.dropped["lane_broken"] > 0)
        exchange_after(server, client)
        assert isinstance(stuck_once[0], Stuck)
        assert stuck_once[0].is_aborted


def exchange_after(server: TorchDistChannel, client: TorchDistChannel) -> None:
    """Tensors travel on the link that follows; nothing of the one before arrives there."""
    until(lambda: client._links[SERVER].link is not None)
    client.send_tensors(SERVER, Ping(7), {"x": torch.arange(5)})
    envelope = server.receive(20)
    assert envelope.message == Ping(7)
    assert envelope.tensors is not None
    assert torch.equal(envelope.tensors["x"], torch.arange(5))


def announced(number: int, head: bytes) -> bytes:
    return struct.pack("<Q", number) + head


def head_of(**tensors: torch.Tensor) -> bytes:
    return ParcelHead.of(Ping(1), tensors).encode()


def of_two_billion_rows() -> bytes:
    head = ParcelHead.of(Ping(1), {"x": torch.zeros(1)})
    spec = type(head.specs[0])("x", "float32", (2_000_000_000,))
    return ParcelHead(head.message, (spec,)).encode()


RUBBISH = {
    "nothing": b"",
    "another number": announced(3, head_of(x=torch.ones(3))),
    "no head": announced(0, b"rubbish"),
    "a head without bytes": announced(0, head_of(x=torch.ones(3))),
    "too large": announced(0, of_two_billion_rows()),
}


@pytest.mark.parametrize("content", RUBBISH.values(), ids=RUBBISH)
def test_an_announcement_that_is_not_one_costs_the_link_and_no_more(content: bytes) -> None:
    with linked(gloo_lanes("1"), gloo_lanes("2")) as (server, client):
        assert client._links[SERVER].send(FrameKind.ANNOUNCEMENT, memoryview(bytearray(content)))
        assert until_lost(client) == PeerLost()
        assert server.counters.dropped["malformed"] + server.counters.dropped["lane_broken"] == 1
        exchange_after(server, client)


def test_an_announcement_where_there_is_no_lane_costs_the_link() -> None:
    with linked(None, None) as (server, client):
        content = announced(0, head_of(x=torch.ones(3)))
        assert client._links[SERVER].send(FrameKind.ANNOUNCEMENT, memoryview(bytearray(content)))
        assert until_lost(client) == PeerLost()
        assert server.counters.dropped == {"malformed": 1}
        exchange_after(server, client)


@pytest.mark.parametrize("fault", ["another shape", "another parcel"])
def test_bytes_that_are_not_those_announced_are_not_delivered(fault: str) -> None:
    with linked(gloo_lanes("1"), gloo_lanes("2")) as (server, client):
        link = client._links[SERVER].link
        assert link is not None
        assert link.lane is not None
        sent = link.lane.pack(Ping(1), {"x": torch.ones(64)})
        assert sent is not None
        link.lane.announcement(sent)  # its seal is that of parcel 0
        if fault == "another parcel":
            content = announced(0, sent.head)
            sent.flat[-64:].zero_()
            sent.flat[-64] = 9
        else:
            content = announced(0, head_of(x=torch.ones(128)))
        assert link.send(FrameKind.ANNOUNCEMENT, memoryview(bytearray(content)))
        link.lane.send(sent)
        assert until_lost(client) == PeerLost()
        assert server.counters.dropped["malformed"] + server.counters.dropped["lane_broken"] == 1
        exchange_after(server, client)


def test_a_message_that_cannot_be_understood_costs_its_parcel_alone() -> None:
    old = bytearray(encode(Ping(1)))
    old[2] = 9
    with linked(gloo_lanes("1"), gloo_lanes("2")) as (server, client):
        link = client._links[SERVER].link
        assert link is not None
        assert link.lane is not None
        for message in (b"rubbish", bytes(old)):
            sent = link.lane.pack(Ping(1), {"x": torch.ones(3)})
            assert sent is not None
            head = ParcelHead(message, ParcelHead.of(Ping(1), {"x": torch.ones(3)}).specs)
            assert link.ship(Shipment(head.encode(), sent.num_bytes, sent.flat))
        client.send_tensors(SERVER, Ping(5), {"x": torch.ones(3)})
        assert server.receive(10).message == Ping(5)
        assert server.counters.dropped == {"malformed": 1, "version": 1}
        assert client._links[SERVER].link is link, "the link stands"


def test_tensors_of_another_device_go_by_the_host() -> None:
    class Elsewhere(GlooPipe):
        def __init__(self, pipe: GlooPipe) -> None:
            super().__init__(pipe._groups, pipe._rank)  # type: ignore[arg-type]

        @property
        def device(self) -> torch.device:
            return torch.device("meta")

    with linked(gloo_lanes("1", wrap=Elsewhere), gloo_lanes("2", wrap=Elsewhere)) as (server, client):
        assert lane_of(client) is not None
        exchange_tensors(server, client)


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_process_that_dies_or_hangs_is_noticed_and_its_lane_ended(end: str) -> None:
    client = TorchDistChannel(CLIENT, options=HASTY, lanes=gloo_lanes("1"))
    with channels(client), echo_process(client.address, lanes="2") as (process, address):
        client.connect(address)
        client.send(ECHO, Ping(0))
        assert client.receive(30).message == Ping(0)
        until(lambda: client._links[ECHO].link is not None)
        hidden = torch.randn(3000, 64)
        client.send_tensors(ECHO, Ping(1), {"hidden": hidden})
        envelope = client.receive(30)
        assert envelope.tensors is not None
        assert torch.equal(envelope.tensors["hidden"], hidden)
        pipe = pipe_of(client, ECHO)
        assert pipe.num_received_bytes > hidden.nbytes
        os.kill(process.pid, signal.SIGKILL if end == "killed" else signal.SIGSTOP)
        started_s = time.monotonic()
        for _ in range(5):
            client.send_tensors(ECHO, Ping(2), {"hidden": hidden})  # never blocks
        assert time.monotonic() - started_s < 1.0
        assert until_lost(client) == PeerLost()
        until(lambda: pipe.is_aborted)


def test_a_process_with_lanes_ends_in_an_orderly_way() -> None:
    """While links are being opened, stand, and cannot be opened: no abort when the interpreter ends."""
    program = "import sys; from tests.specdec.transport.test_device_lane import end_in_the_middle as f; f()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, "terminate called" in done.stderr) == (0, False), done.stderr


def end_in_the_middle() -> None:
    server = TorchDistChannel(SERVER, lanes=gloo_lanes("1"))
    several = [TorchDistChannel(PeerId(f"{CLIENT}-{index}"), lanes=gloo_lanes("2")) for index in range(4)]
    server.admit([one.address for one in several])
    for one in several:
        one.connect(server.address)
        one.send(SERVER, Ping(1))
    assert isinstance(server.receive(20).message, Ping)


def until(condition: Callable[[], Any]) -> None:
    give_up_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_auto_has_no_lanes_and_nccl_is_refused() -> None:
    cpu = torch.device("cpu")
    assert nccl_lanes("gloo", cpu) is None
    assert nccl_lanes("auto", cpu) is None
    with pytest.raises(ConfigError, match=r"cluster\.channels\.tensors: nccl"):
        nccl_lanes("nccl", cpu)
