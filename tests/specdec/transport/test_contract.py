"""What every transport promises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from specdec.core.errors import ChannelClosed, ChannelTimeout, ProtocolError
from specdec.transport.base import Channel, PeerId, PeerLost
from specdec.transport.messages import Fatal, MetricsReply, Ping

OpenChannel = Callable[[str], Channel]


def linked(open_channel: OpenChannel) -> tuple[Channel, Channel]:
    """A client connected to a server that admits it."""
    server, client = open_channel("server"), open_channel("client")
    server.admit([client.address])
    client.connect(server.address)
    return server, client


def test_messages_arrive_in_order_and_replies_find_their_way(open_channel: OpenChannel) -> None:
    server, client = linked(open_channel)
    for nonce in range(100):
        client.send(PeerId("server"), Ping(nonce))
    for nonce in range(100):
        envelope = server.receive(10)
        assert (envelope.sender, envelope.message) == ("client", Ping(nonce))
        server.send(PeerId("client"), Ping(-nonce))
    assert [client.receive(10).message for _ in range(100)] == [Ping(-nonce) for nonce in range(100)]
    assert (client.counters.sent, client.counters.received) == (100, 100)


def test_a_wait_ends_with_a_timeout(open_channel: OpenChannel) -> None:
    server, _ = linked(open_channel)
    for timeout_s in (0.0, 0.01):
        with pytest.raises(ChannelTimeout):
            server.receive(timeout_s)


def test_wake_ends_a_wait_of_another_thread(open_channel: OpenChannel) -> None:
    server, _ = linked(open_channel)
    waker = threading.Timer(0.05, server.wake)
    waker.start()
    with pytest.raises(ChannelTimeout):
        server.receive(30)
    waker.join()


def test_wake_before_a_wait_is_not_lost(open_channel: OpenChannel) -> None:
    server, _ = linked(open_channel)
    server.wake()
    with pytest.raises(ChannelTimeout):
        server.receive(30)


def test_a_stranger_is_not_heard(open_channel: OpenChannel) -> None:
    server, client = linked(open_channel)
    stranger = open_channel("stranger")
    stranger.connect(server.address)
    stranger.send(PeerId("server"), Ping(666))
    client.send(PeerId("server"), Ping(1))
    assert server.receive(10).sender == "client"
    with pytest.raises(ChannelTimeout):
        server.receive(0.3)
    assert server.counters.dropped.keys() & {"foreign", "refused_link"}


def test_admission_may_come_after_the_link_and_may_be_withdrawn(open_channel: OpenChannel) -> None:
    server, client = open_channel("server"), open_channel("client")
    client.connect(server.address)
    server.admit([client.address])
    until = time.monotonic() + 10
    while True:  # a link refused before its admission is retried by the client
        client.send(PeerId("server"), Ping(1))
        with pytest.raises(ChannelTimeout):
            client.receive(0.05)
        try:
            assert server.receive(0.2).sender == "client"
            break
        except ChannelTimeout:
            assert time.monotonic() < until
    server.admit([])
    while True:
        client.send(PeerId("server"), Ping(2))
        if server.counters.dropped["foreign"]:
            break
        assert time.monotonic() < until
        try:
            server.receive(0.02)
        except ChannelTimeout:
            continue


def test_an_unknown_peer_gets_nothing_and_costs_nothing(open_channel: OpenChannel) -> None:
    _, client = linked(open_channel)
    client.send(PeerId("nobody"), Ping(1))
    assert client.counters.dropped["unknown_peer"] == 1


def test_an_oversized_message_is_an_error_at_its_sender(open_channel: OpenChannel) -> None:
    server, client = linked(open_channel)
    with pytest.raises(ProtocolError, match="exceeds"):
        client.send(PeerId("server"), Fatal("x" * (2 << 20)))
    client.send(PeerId("server"), Fatal("x" * (1 << 19)))
    message = server.receive(10).message
    assert isinstance(message, Fatal)
    assert len(message.reason) == 1 << 19


def test_large_and_small_messages_keep_their_order(open_channel: OpenChannel) -> None:
    server, client = linked(open_channel)
    big = MetricsReply(1, {f"series_{i}": float(i) for i in range(10_000)})
    for _ in range(3):
        client.send(PeerId("server"), big)
        client.send(PeerId("server"), Ping(1))
    assert [type(server.receive(10).message) for _ in range(6)] == [MetricsReply, Ping] * 3


def test_the_death_of_a_peer_is_reported_to_those_connected_to_it(open_channel: OpenChannel) -> None:
    server, client = linked(open_channel)
    client.send(PeerId("server"), Ping(1))
    server.receive(10)
    server.close()
    envelope = client.receive(10)
    assert (envelope.sender, envelope.message) == ("server", PeerLost())


def test_a_closed_channel_says_so_and_closes_twice(open_channel: OpenChannel) -> None:
    server, client = linked(open_channel)
    client.close()
    client.close()
    with pytest.raises(ChannelClosed):
        client.send(PeerId("server"), Ping(1))
    with pytest.raises(ChannelClosed):
        client.receive(0)
    client.wake()
    server.send(PeerId("client"), Ping(1))  # never blocks, whoever is gone


def test_what_was_sent_before_closing_leaves_when_asked_to(open_channel: OpenChannel) -> None:
    server, client = linked(open_channel)
    client.send(PeerId("server"), Ping(0))
    server.receive(10)
    for nonce in range(50):
        client.send(PeerId("server"), Ping(nonce))
    client.close(flush_s=5.0)
    assert [server.receive(10).message for _ in range(50)] == [Ping(nonce) for nonce in range(50)]


def test_after_disconnect_nothing_is_sent(open_channel: OpenChannel) -> None:
    server, client = linked(open_channel)
    client.send(PeerId("server"), Ping(1))
    server.receive(10)
    client.disconnect(PeerId("server"))
    client.disconnect(PeerId("server"))
    client.send(PeerId("server"), Ping(2))
    assert client.counters.dropped["unknown_peer"] == 1
    client.connect(server.address)
    client.send(PeerId("server"), Ping(3))
    assert server.receive(10).message == Ping(3)


def test_two_peers_may_link_to_each_other(open_channel: OpenChannel) -> None:
    left, right = open_channel("left"), open_channel("right")
    left.admit([right.address])
    right.admit([left.address])
    left.connect(right.address)
    right.connect(left.address)
    left.send(PeerId("right"), Ping(1))
    right.send(PeerId("left"), Ping(2))
    assert right.receive(10).message == Ping(1)
    assert left.receive(10).message == Ping(2)
