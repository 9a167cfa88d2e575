"""What only channels with tensors have, and what only Gloo does: silent peers, dead ones, its open door."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch.distributed import TCPStore

from specdec.core.errors import ChannelTimeout, ProtocolError, ResourceError
from specdec.transport.base import PeerAddress, PeerId, PeerLost
from specdec.transport.gloo_link import FrameKind, TorchDistOptions
from specdec.transport.memory import MemoryNetwork
from specdec.transport.messages import Ping, encode
from specdec.transport.torch_dist import TorchDistChannel
from tests.specdec.transport.echo_peer import echo_process
from tests.specdec.transport.tensor_exchange import CLIENT, ECHO, SERVER, exchange_tensors, until_lost


@contextmanager
def channels(*names: str, options: TorchDistOptions | None = None) -> Iterator[list[TorchDistChannel]]:
    opened = [TorchDistChannel(PeerId(name), options=options) for name in names]
    try:
        yield opened
    finally:
        for channel in opened:
            channel.close()


@contextmanager
def linked(options: TorchDistOptions | None = None) -> Iterator[tuple[TorchDistChannel, TorchDistChannel]]:
    with channels("server", "client", options=options) as (server, client):
        server.admit([client.address])
        client.connect(server.address)
        client.send(SERVER, Ping(0))
        assert server.receive(10).message == Ping(0)
        yield server, client


def unheard(server: TorchDistChannel, seconds: float = 0.3) -> None:
    with pytest.raises(ChannelTimeout):
        server.receive(seconds)


@pytest.mark.parametrize("transport", ["memory", "torch_dist"])
def test_tensors_arrive_with_their_message_in_order(transport: str) -> None:
    if transport == "memory":
        network = MemoryNetwork()
        exchange_tensors(network.open(SERVER), network.open(CLIENT))
    else:
        with channels("server", "client") as (server, client):
            exchange_tensors(server, client)


def test_more_than_the_bound_is_an_error_at_its_sender() -> None:
    options = TorchDistOptions(max_parcel_bytes=10_000)
    with linked(options) as (_, client), pytest.raises(ProtocolError, match="exceeds"):
        client.send_tensors(SERVER, Ping(1), {"x": torch.zeros(10_000)})


def test_who_sends_more_than_may_be_queued_takes_nobody_elses_place() -> None:
    with channels("server", "noisy", "quiet", options=TorchDistOptions(max_queued_messages=8)) as opened:
        server, noisy, quiet = opened
        server.admit([noisy.address, quiet.address])
        noisy.connect(server.address)
        quiet.connect(server.address)
        give_up_s = time.monotonic() + 10
        while not server.counters.dropped["full"]:
            assert time.monotonic() < give_up_s
            noisy.send(SERVER, Ping(1))
            time.sleep(0.001)
        for nonce in range(8):
            quiet.send(SERVER, Ping(nonce))
        heard = [server.receive(10) for _ in range(16)]
        assert [one.message for one in heard if one.sender == quiet.address.peer_id] == [
            Ping(nonce) for nonce in range(8)
        ]


def test_what_waits_for_a_link_that_never_comes_up_is_bounded() -> None:
    with channels("client", options=TorchDistOptions(max_queued_bytes=100_000)) as (client,):
        with channels("server") as (server,):
            gone = server.address
        client.connect(gone)
        for _ in range(20):
            client.send_tensors(gone.peer_id, Ping(1), {"x": torch.zeros(2_500)})
        assert client.counters.dropped["full"] >= 10
        assert client._links[gone.peer_id]._num_unsent_bytes <= 100_000


def test_a_long_message_alone_is_taken_and_what_waits_in_the_inbox_is_bounded() -> None:
    with channels("server", "client", options=TorchDistOptions(max_queued_bytes=50_000)) as opened:
        server, client = opened
        server.admit([client.address])
        client.connect(server.address)
        client.send_tensors(SERVER, Ping(0), {"x": torch.zeros(50_000)})
        assert server.receive(10).message == Ping(0)
        give_up_s = time.monotonic() + 10
        num_sent = 0
        while not server.counters.dropped["full"]:
            assert time.monotonic() < give_up_s
            client.send_tensors(SERVER, Ping(1), {"x": torch.zeros(2_500)})
            num_sent += 1
            time.sleep(0.001)
        assert num_sent > 3
        num_heard = 0
        with contextlib.suppress(ChannelTimeout):
            while True:
                assert server.receive(0.5).message == Ping(1)
                num_heard += 1
        assert 0 < num_heard < num_sent
        client.send_tensors(SERVER, Ping(2), {"x": torch.zeros(2_500)})
        assert server.receive(10).message == Ping(2), "there is room again"


def test_a_member_that_sends_rubbish_is_counted_and_harms_nobody() -> None:
    with (
        channels("client") as (client,),
        channels("server", options=TorchDistOptions(max_parcel_bytes=1 << 16)) as (server,),
    ):
        server.admit([client.address])
        client.connect(server.address)
        old = bytearray(encode(Ping(1)))
        old[2] = 9
        for content in (b"rubbish", b"", bytes(old), bytes(40_000)):
            assert client._links[SERVER].send(FrameKind.MESSAGE, memoryview(bytearray(content)))
        for content in (b"rubbish", encode(Ping(1)), bytes(40_000)):
            assert client._links[SERVER].send(FrameKind.PARCEL, memoryview(bytearray(content)))
        client.send_tensors(
            SERVER, Ping(1), {"x": torch.zeros(2_000_000)}
        )  # over the server's bound, not ours
        client.send(SERVER, Ping(5))
        assert server.receive(10).message == Ping(5)
        assert server.counters.dropped == {"malformed": 6, "version": 1, "too_large": 1}
        assert client._links[SERVER].link is not None, "the link stands"


def test_the_name_of_a_member_without_its_key_is_not_enough() -> None:
    with channels("server", "member", "member") as (server, member, impostor):
        server.admit([member.address])
        impostor.connect(server.address)
        impostor.send(SERVER, Ping(666))
        unheard(server)
        assert server.counters.dropped["refused_link"]
        member.connect(server.address)
        member.send(SERVER, Ping(1))
        assert server.receive(10).message == Ping(1)


def test_a_member_that_does_not_know_whom_it_calls_is_refused() -> None:
    with channels("server", "client") as (server, client):
        server.admit([client.address])
        endpoint = server.address.endpoint
        client.connect(PeerAddress(peer_id=SERVER, endpoint=endpoint, public_key="f" * 64))
        client.send(SERVER, Ping(1))
        unheard(server)
        assert server.counters.dropped["refused_link"]


def test_rubbish_at_the_door_does_not_shut_it() -> None:
    with channels("server", "client") as (server, client):
        host, port = server.address.endpoint.removeprefix("tcp://").split(":")
        store = TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=5))
        fields = b"\xa1a\xa1a\xa1a\xc4\x01a"
        deep, no_text = (
            b"\x96" + fields + b"\xc0" + b"\x91" * 100_000,
            b"\x94" + fields.replace(b"a", b"\xff"),
        )
        knocks = (b"", b"rubbish", b"\x94\x01\x02\x03\x04", no_text, deep)
        for knock in knocks:
            store.queue_push("knocks", knock)  # type: ignore[attr-defined]
        server.admit([client.address])
        client.connect(server.address)
        client.send(SERVER, Ping(1))
        assert server.receive(10).message == Ping(1)
        assert server.counters.dropped["malformed"] == len(knocks)


def test_an_address_that_cannot_be_bound_is_a_clear_error() -> None:
    with pytest.raises(ResourceError, match=r"cannot bind a channel to 203\.0\.113\.7"):
        TorchDistChannel(PeerId("nowhere"), host="203.0.113.7")


def test_an_idle_link_stays_up() -> None:
    with linked(TorchDistOptions(heartbeat_interval_s=0.05, heartbeat_timeout_s=1.0)) as (server, client):
        unheard(client, 2.0)
        client.send(SERVER, Ping(1))
        assert server.receive(10).message == Ping(1)


def test_nothing_is_left_of_a_closed_channel() -> None:
    with linked() as (server, client):
        pass
    for channel in (server, client):
        channel.join()
        assert not any(thread.is_alive() for thread in channel._threads)


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_process_that_dies_or_hangs_is_noticed_and_nothing_waits_for_it(end: str) -> None:
    """SIGKILL: its kernel closes the connection. SIGSTOP, as when a machine is gone: only silence tells."""
    options = TorchDistOptions(heartbeat_interval_s=0.1, heartbeat_timeout_s=1.0)
    with channels("client", options=options) as (client,), echo_process(client.address) as (process, address):
        client.connect(address)
        hidden = torch.randn(3000, 64)
        client.send_tensors(ECHO, Ping(1), {"hidden": hidden})
        envelope = client.receive(30)
        assert envelope.message == Ping(1)
        assert envelope.tensors is not None
        assert torch.equal(envelope.tensors["hidden"], hidden)
        os.kill(process.pid, signal.SIGKILL if end == "killed" else signal.SIGSTOP)
        for _ in range(5):
            client.send_tensors(ECHO, Ping(2), {"hidden": hidden})  # never blocks
        assert until_lost(client) == PeerLost()
        client.send(ECHO, Ping(3))
        started_s = time.monotonic()
        unheard(client, 0.2)
        assert time.monotonic() - started_s < 10


def test_who_cannot_be_reached_is_reported_until_it_is_not_wanted_any_more() -> None:
    options = TorchDistOptions(unreached_s=0.2, connect_timeout_s=1.0)
    dead = PeerAddress(peer_id=SERVER, endpoint="tcp://127.0.0.1:1", public_key="")
    with channels("client", options=options) as (client,):
        client.connect(dead)
        client.send_tensors(SERVER, Ping(1), {"hidden": torch.zeros(9)})
        for _ in range(2):
            envelope = client.receive(30)
            assert (envelope.sender, envelope.message) == (SERVER, PeerLost())
        client.disconnect(SERVER)
        until_s = time.monotonic() + 30
        while any(thread.is_alive() for thread in client._threads):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        client.send(SERVER, Ping(2))
        assert client.counters.dropped["unknown_peer"] == 1
