"""Lanes beside ZeroMQ links: who may use them, that frames stay in order, what happens when they break."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest

from specdec.core.errors import ChannelTimeout
from specdec.transport.base import PeerId, PeerLost
from specdec.transport.lane import Lane
from specdec.transport.messages import Fatal, LaneOffer, Message, Ping
from specdec.transport.zmq import ZmqChannel, ZmqOptions

SERVER, CLIENT = PeerId("server"), PeerId("client")
MAX_BYTES = 8 << 20


@contextmanager
def linked(*, server_has: bool = True, client_has: bool = True) -> Iterator[tuple[ZmqChannel, ZmqChannel]]:
    """A client connected to a server that admits it."""
    server = ZmqChannel(SERVER, options=ZmqOptions(local_lanes=server_has, max_message_bytes=MAX_BYTES))
    client = ZmqChannel(CLIENT, options=ZmqOptions(local_lanes=client_has, max_message_bytes=MAX_BYTES))
    try:
        server.admit([client.address])
        client.connect(server.address)
        yield server, client
    finally:
        client.close()
        server.close()


def heard(channel: ZmqChannel, timeout_s: float = 0.005) -> list[Message | PeerLost]:
    messages: list[Message | PeerLost] = []
    with contextlib.suppress(ChannelTimeout):
        while True:
            messages.append(channel.receive(timeout_s).message)
    return messages


def attend(server: ZmqChannel, client: ZmqChannel, until: Callable[[], bool]) -> list[Message | PeerLost]:
    """Let both sides do what they do while waiting; return what came."""
    messages: list[Message | PeerLost] = []
    give_up_s = time.monotonic() + 10
    while not until():
        assert time.monotonic() < give_up_s
        messages += [*heard(client), *heard(server)]
    return messages


def open_lane(server: ZmqChannel, client: ZmqChannel) -> None:
    attend(server, client, lambda: server.num_lanes == client.num_lanes == 1)


def test_near_peers_move_to_a_lane_and_keep_the_order_of_their_messages() -> None:
    with linked() as (server, client):
        to_server: list[object] = []
        to_client: list[object] = []
        num_sent = 0
        while not server.num_lanes == client.num_lanes == 1 or num_sent < 300:
            assert num_sent < 30_000
            for _ in range(10):
                client.send(SERVER, Ping(num_sent))
                server.send(CLIENT, Ping(num_sent))  # dropped until the client has been heard
                num_sent += 1
            to_server += heard(server, 0)
            to_client += heard(client, 0)
        give_up_s = time.monotonic() + 10
        while len(to_server) < num_sent and time.monotonic() < give_up_s:
            to_server += heard(server, 0.01)
            to_client += heard(client, 0)  # what the kernel had no room for leaves while one attends
        to_server += heard(server, 0)
        to_client += heard(client, 0.2)
        assert to_server == [Ping(nonce) for nonce in range(num_sent)]
        first = num_sent - len(to_client)
        assert first == server.counters.dropped["unknown_peer"]
        assert to_client == [Ping(nonce) for nonce in range(first, num_sent)]
        assert (client.counters.sent, server.counters.received) == (num_sent, num_sent)


@pytest.mark.parametrize(("server_has", "client_has"), [(False, True), (True, False)])
def test_without_the_others_consent_there_is_no_lane(server_has: bool, client_has: bool) -> None:
    with linked(server_has=server_has, client_has=client_has) as (server, client):
        for nonce in range(20):
            client.send(SERVER, Ping(nonce))
            assert server.receive(10).message == Ping(nonce)
            server.send(CLIENT, Ping(nonce))
            assert client.receive(10).message == Ping(nonce)
        assert not client.num_lanes
        assert not server.num_lanes


def test_messages_larger_than_the_kernels_buffer_arrive_whole_and_in_order() -> None:
    with linked() as (server, client):
        open_lane(server, client)
        sent: list[Message] = [Fatal("x" * (4 << 20)), Ping(1), Fatal("y" * (1 << 20)), Ping(2)]
        for message in sent:
            client.send(SERVER, message)
        assert attend(server, client, lambda: server.counters.received == len(sent)) == sent


def test_what_is_sent_before_closing_leaves_when_asked_to() -> None:
    with linked() as (server, client):
        open_lane(server, client)
        client.send(SERVER, Ping(1))
        client.close(flush_s=5.0)
        assert server.receive(10).message == Ping(1)
        with pytest.raises(ChannelTimeout):
            server.receive(0.05)
        assert server.num_lanes == 0


def test_the_last_words_of_a_dying_peer_come_before_the_news_of_its_loss() -> None:
    with linked() as (server, client):
        open_lane(server, client)
        client.send(SERVER, Ping(0))
        server.receive(10)
        server.send(CLIENT, Fatal("out of memory"))
        server.close()
        assert [client.receive(10).message for _ in range(2)] == [Fatal("out of memory"), PeerLost()]
        assert client.num_lanes == 0


def test_a_member_that_is_admitted_no_longer_is_unheard_at_once() -> None:
    with linked() as (server, client):
        open_lane(server, client)
        server.admit([])
        client.send(SERVER, Ping(1))
        assert heard(server, 0.1) == []
        assert server.counters.dropped["foreign"] == 1


def test_a_lane_that_breaks_is_replaced_by_the_link() -> None:
    with linked() as (server, client):
        open_lane(server, client)
        server._lanes.drop(server._callers[CLIENT])
        assert attend(server, client, lambda: client.num_lanes == 0) == []
        client.send(SERVER, Ping(1))
        assert server.receive(10).message == Ping(1)
        server.send(CLIENT, Ping(2))
        assert client.receive(10).message == Ping(2)


def test_a_client_that_links_anew_gets_a_lane_anew() -> None:
    with linked() as (server, client):
        for nonce in range(3):
            open_lane(server, client)
            client.send(SERVER, Ping(nonce))
            assert server.receive(10).message == Ping(nonce)
            client.disconnect(SERVER)
            attend(server, client, lambda: server.num_lanes == client.num_lanes == 0)
            client.connect(server.address)


def test_who_cannot_show_the_secret_is_not_let_in() -> None:
    listening = Lane.listen(MAX_BYTES)
    try:
        forged = LaneOffer(listening.offer.name, bytes(len(listening.offer.secret)))
        intruder = Lane.take_up(forged, MAX_BYTES)
        assert intruder is not None
        assert not listening.accept()
        assert not listening.is_open
        friend = Lane.take_up(listening.offer, MAX_BYTES)
        assert friend is not None
        assert listening.accept()
        friend.send(b"frame", 10, MAX_BYTES)
        assert listening.receive() == ([b"frame"], True)
        assert not all(intruder.send(b"frame", 10, MAX_BYTES) for _ in range(2))
        intruder.close()
        friend.close()
        assert listening.receive() == ([], False)
    finally:
        listening.close()


def test_a_lane_to_somebody_elses_service_is_not_taken_up() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as service:
        service.bind(b"\0some-other-service")
        service.listen(1)
        service.settimeout(0.05)
        assert Lane.take_up(LaneOffer("some-other-service", b"GET /"), MAX_BYTES) is None
        with pytest.raises(TimeoutError):
            service.accept()


def test_a_frame_beyond_the_bound_breaks_the_lane() -> None:
    listening = Lane.listen(100)
    sender = Lane.take_up(listening.offer, MAX_BYTES)
    assert sender is not None
    assert listening.accept()
    sender.send(b"x" * 100, 10, MAX_BYTES)
    sender.send(b"x" * 101, 10, MAX_BYTES)
    assert listening.receive() == ([b"x" * 100], False)
    for lane in (listening, sender):
        lane.close()


def test_a_full_backlog_is_reported() -> None:
    listening = Lane.listen(MAX_BYTES)
    sender = Lane.take_up(listening.offer, MAX_BYTES)
    assert sender is not None
    assert listening.accept()
    for _ in range(2):
        sender.send(b"x" * (1 << 20), 2, MAX_BYTES)
    with pytest.raises(BlockingIOError):
        sender.send(b"x", 2, MAX_BYTES)
    frames: list[bytes] = []
    while len(frames) < 2:
        assert sender.flush()
        arrived, stands = listening.receive()
        assert stands
        frames += arrived
    assert not sender.has_backlog
    assert frames == [b"x" * (1 << 20)] * 2
    for lane in (listening, sender):
        lane.close()


def test_what_waits_for_a_peer_that_does_not_read_is_bounded_in_bytes() -> None:
    most = 300_000
    listening = Lane.listen(MAX_BYTES)
    sender = Lane.take_up(listening.offer, MAX_BYTES)
    assert sender is not None
    assert listening.accept()
    frames = [bytes([number]) * 50_000 for number in range(100)]
    num_sent = 0
    with contextlib.suppress(BlockingIOError):
        for frame in frames:
            sender.send(frame, 1000, most)
            num_sent += 1
    assert num_sent < 100
    waiting = b"".join(sender._backlog)
    assert most - 50_004 < len(waiting) == sender._num_backlog_bytes <= most
    arrived: list[bytes] = []
    while len(arrived) < num_sent:
        assert sender.flush()
        some, stands = listening.receive()
        assert stands
        arrived += some
    assert arrived == frames[:num_sent]
    assert sender._num_backlog_bytes == 0
    assert sender.send(b"x" * (2 * most), 1000, most), "one frame may wait however long it is"
    with pytest.raises(BlockingIOError):
        sender.send(b"x", 1000, most)
    for lane in (listening, sender):
        lane.close()


def test_a_peer_that_dies_before_it_has_moved_is_not_looked_at_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with linked() as (server, client):
        client.send(SERVER, Ping(0))
        while client._links[SERVER].lane is None:
            heard(client, 0)
        while CLIENT not in server._callers or server._callers[CLIENT].lane is None:
            heard(server)
        lane = server._callers[CLIENT].lane
        assert lane is not None
        assert (lane.is_open, lane.peer_has_moved) == (True, False)
        client.close()
        heard(server, 0.05)  # the loss of the link itself
        num_looks = 0
        look = ZmqChannel._look_at_sockets

        def counted(channel: ZmqChannel) -> None:
            nonlocal num_looks
            num_looks += 1
            look(channel)

        monkeypatch.setattr(ZmqChannel, "_look_at_sockets", counted)
        assert heard(server, 0.2) == []
        assert num_looks < 20


def test_who_sends_on_and_on_keeps_nobody_reading() -> None:
    listening = Lane.listen(MAX_BYTES)
    sender = Lane.take_up(listening.offer, MAX_BYTES)
    assert sender is not None
    assert listening.accept()
    arrived = listening._socket

    class Endless:
        """A socket that is full again as soon as it has been read."""

        num_reads = 0

        def recv(self, num_bytes: int) -> bytes:
            self.num_reads += 1
            assert self.num_reads < 100
            return (struct.pack("<I", 60) + bytes(60)) * (num_bytes // 64)

    listening._socket = cast(socket.socket, Endless())
    frames, stands = listening.receive()
    assert stands
    assert frames[0] == bytes(60)
    listening._socket = arrived
    for lane in (listening, sender):
        lane.close()
