"""What only the ZeroMQ transport has: keys, the gate, raw hostile sockets."""

from __future__ import annotations

import contextlib
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from specdec.core.errors import ChannelTimeout, ResourceError
from specdec.transport.base import PeerAddress, PeerFound, PeerId, PeerLost
from specdec.transport.messages import Fatal, Ping, encode
from specdec.transport.zmq import KeyPair, ZmqChannel, ZmqOptions
from tests.specdec.transport.conftest import has_ipv6_loopback
from tests.specdec.transport.raw_dealer import raw_dealer


@contextmanager
def channels(*names: str) -> Iterator[list[ZmqChannel]]:
    opened = [ZmqChannel(PeerId(name), options=ZmqOptions(max_message_bytes=1 << 16)) for name in names]
    try:
        yield opened
    finally:
        for channel in opened:
            channel.close()


class Wire:
    """What lies between a client and a server: it can be cut, and lets nobody through for a while."""

    def __init__(self, server: PeerAddress) -> None:
        self._to = ("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._is_open = True
        self.address = PeerAddress(
            peer_id=server.peer_id,
            endpoint=f"tcp://127.0.0.1:{self._listener.getsockname()[1]}",
            public_key=server.public_key,
        )
        self._start(self._accept)

    def cut(self, *, is_open: bool) -> None:
        """Break what goes through it, and take in new connections, or not."""
        self._is_open = is_open
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut(is_open=False)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _start(self, work: Callable[..., None], *args: socket.socket) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                if not self._is_open:
                    caller.close()
                    continue
                server = socket.create_connection(self._to)
                self._ends += [caller, server]
                self._start(self._carry, caller, server)
                self._start(self._carry, server, caller)

    def _carry(self, source: socket.socket, destination: socket.socket) -> None:
        with contextlib.suppress(OSError), source:
            while data := source.recv(1 << 16):
                destination.sendall(data)
            destination.shutdown(socket.SHUT_RDWR)


def unheard(server: ZmqChannel, seconds: float = 0.3) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with pytest.raises(ChannelTimeout):
            server.receive(0.05)


def test_a_secret_key_is_neither_shown_nor_pickled() -> None:
    keys = KeyPair.generate()
    assert keys.secret not in repr(keys)
    with pytest.raises(TypeError, match="does not leave"):
        pickle.dumps(keys)


def test_a_peer_without_curve_is_not_heard() -> None:
    with channels("server") as (server,), raw_dealer(server, None) as dealer:
        dealer.send(encode(Ping(1)))
        unheard(server)


def test_a_peer_with_a_key_of_its_own_is_not_heard() -> None:
    with channels("server") as (server,), raw_dealer(server, KeyPair.generate()) as dealer:
        dealer.send(encode(Ping(1)))
        unheard(server)
        assert server.counters.dropped["refused_link"] >= 1


def test_the_name_of_a_member_without_its_key_is_not_enough() -> None:
    with channels("server", "member", "member") as (server, member, impostor):
        server.admit([member.address])
        impostor.connect(server.address)
        impostor.send(PeerId("server"), Ping(666))
        unheard(server)
        member.connect(server.address)
        member.send(PeerId("server"), Ping(1))
        assert server.receive(10).message == Ping(1)


def test_a_member_that_sends_rubbish_is_counted_and_harms_nobody() -> None:
    keys = KeyPair.generate()
    with channels("server", "good") as (server, good):
        member = ZmqChannel(PeerId("member"), keys=keys)
        server.admit([member.address, good.address])
        member.close()
        with raw_dealer(server, keys) as dealer:
            old = bytearray(encode(Ping(1)))
            old[2] = 9
            dealer.send(b"rubbish")
            dealer.send(b"")
            dealer.send(bytes(old))
            dealer.send_multipart([encode(Ping(1)), b"one part too many"])
            dealer.send(encode(Ping(5)))
            envelope = server.receive(10)
            assert (envelope.sender, envelope.message) == ("member", Ping(5))
            assert server.counters.dropped == {"malformed": 3, "version": 1}
            dealer.send(b"x" * (1 << 17))  # over the bound: ZeroMQ cuts the link
            good.connect(server.address)
            good.send(PeerId("server"), Ping(6))
            assert server.receive(10).sender == "good"
            unheard(server, 0.1)


def test_a_server_with_another_key_than_the_directory_says_is_not_spoken_to() -> None:
    with channels("server", "client") as (server, client):
        server.admit([client.address])
        wrong = KeyPair.generate().public
        client.connect(
            type(server.address)(peer_id=PeerId("server"), endpoint=server.address.endpoint, public_key=wrong)
        )
        client.send(PeerId("server"), Ping(1))
        unheard(server)


def test_a_link_that_was_refused_comes_up_when_its_key_is_admitted() -> None:
    with channels("server", "client") as (server, client):
        client.connect(server.address)
        client.send(PeerId("server"), Ping(1))
        while not server.counters.dropped["refused_link"]:
            unheard(server, 0.05)
        client.send(PeerId("server"), Ping(2))
        server.admit([client.address])
        heard = []
        while len(heard) < 2:
            with contextlib.suppress(ChannelTimeout):
                client.receive(0.01)  # links come up while their owner listens
            with contextlib.suppress(ChannelTimeout):
                heard.append(server.receive(0.01).message)
        assert heard == [Ping(1), Ping(2)]


def test_a_link_that_restarts_under_the_same_key_is_the_same_peer() -> None:
    keys = KeyPair.generate()
    with channels("server") as (server,):
        for nonce in range(2):
            client = ZmqChannel(PeerId("client"), keys=keys)
            server.admit([client.address])
            client.connect(server.address)
            client.send(PeerId("server"), Ping(nonce))
            assert server.receive(10).message == Ping(nonce)
            server.send(PeerId("client"), Ping(nonce))
            assert client.receive(10).message == Ping(nonce)
            client.close()


def test_an_address_that_cannot_be_bound_is_a_clear_error() -> None:
    with pytest.raises(ResourceError, match=r"cannot bind a channel to 203\.0\.113\.7"):
        ZmqChannel(PeerId("nowhere"), host="203.0.113.7")


def test_who_sends_more_than_may_be_queued_is_heard_in_part_and_keeps_nobody_waiting() -> None:
    most = 50
    server = ZmqChannel(PeerId("server"), options=ZmqOptions(local_lanes=False, max_queued_messages=most))
    with contextlib.closing(server), channels("noisy", "quiet") as (noisy, quiet):
        server.admit([noisy.address, quiet.address])
        for client in (noisy, quiet):
            client.connect(server.address)
            client.send(PeerId("server"), Ping(0))
        senders = {server.receive(10).sender, server.receive(10).sender}
        assert senders == {PeerId("noisy"), PeerId("quiet")}
        full = server.counters.dropped
        heard: list[PeerId] = []
        for _ in range(5):  # more than is taken at a time, unless it arrives in small pieces
            before = full["full"]
            heard.clear()
            for nonce in range(24 * most):
                noisy.send(PeerId("server"), Ping(nonce))
            quiet.send(PeerId("server"), Ping(7))
            time.sleep(0.1)
            give_up_s = time.monotonic() + 10
            while len(heard) + full["full"] - before <= 24 * most:
                assert time.monotonic() < give_up_s
                with contextlib.suppress(ChannelTimeout):
                    heard.append(server.receive(0.05).sender)
            assert PeerId("quiet") in heard
            if full["full"]:
                break
        assert full["full"] > 0


def until_heard(server: ZmqChannel, *names: str) -> None:
    """Links come up while their owners listen."""
    missing = set(names)
    until_s = time.monotonic() + 20
    while missing:
        assert time.monotonic() < until_s
        with contextlib.suppress(ChannelTimeout):
            missing.discard(server.receive(0.05).sender)


def take_in(server: ZmqChannel) -> None:
    """Do what `receive` does, but read nothing."""
    server._note_events(0.01)
    server._look_at_sockets()


@pytest.mark.parametrize("by", ["zmq", "lane"])
def test_who_sends_little_does_not_wait_for_all_of_who_sends_much(by: str) -> None:
    server, noisy, quiet = [
        ZmqChannel(PeerId(name), options=ZmqOptions(local_lanes=by == "lane"))
        for name in ("server", "noisy", "quiet")
    ]
    with contextlib.closing(server), contextlib.closing(noisy), contextlib.closing(quiet):
        server.admit([noisy.address, quiet.address])
        for client in (noisy, quiet):
            client.connect(server.address)
            client.send(PeerId("server"), Ping(0))
        until_heard(server, "noisy", "quiet")
        for client in (noisy, quiet):
            with contextlib.suppress(ChannelTimeout):
                client.receive(0.1)  # takes the lane up
        large = Fatal("x" * (1 << 20))
        for _ in range(20):
            noisy.send(PeerId("server"), large)
        assert server.receive(10).message == large
        while len(server._inbox) < 5:  # much of it has come, and lies before us
            with contextlib.suppress(ChannelTimeout):
                noisy.receive(0.01)
            take_in(server)
        quiet.send(PeerId("server"), Ping(7))
        time.sleep(0.1)
        num_before = 0
        while server.receive(10).sender != quiet.address.peer_id:
            num_before += 1
        assert num_before <= 2
        assert len(server._inbox) >= 2, "and the rest is still there"


def test_what_one_peer_has_in_memory_is_bounded_in_bytes() -> None:
    options = ZmqOptions(local_lanes=False, max_queued_bytes=300_000)
    server = ZmqChannel(PeerId("server"), options=options)
    with contextlib.closing(server), channels("noisy", "quiet") as (noisy, quiet):
        server.admit([noisy.address, quiet.address])
        for client in (noisy, quiet):
            client.connect(server.address)
            client.send(PeerId("server"), Ping(0))
        until_heard(server, "noisy", "quiet")
        for _ in range(20):
            noisy.send(PeerId("server"), Fatal("x" * 50_000))
        quiet.send(PeerId("server"), Ping(7))
        heard: list[PeerId] = []
        give_up_s = time.monotonic() + 10
        while len(heard) + server.counters.dropped["full"] < 21:
            assert time.monotonic() < give_up_s
            take_in(server)
            if len(server._inbox) + server.counters.dropped["full"] == 21:
                while server._inbox:
                    heard.append(server.receive(0).sender)
        assert heard.count(PeerId("noisy")) == 5
        assert heard.count(PeerId("quiet")) == 1


def test_what_waits_for_a_link_that_is_not_up_is_bounded_in_bytes() -> None:
    options = ZmqOptions(local_lanes=False, max_unsent_bytes=300_000)
    client, server = (ZmqChannel(PeerId(name), options=options) for name in ("client", "server"))
    with contextlib.closing(client), contextlib.closing(server):
        client.connect(server.address)  # nobody is let in yet
        for _ in range(20):
            client.send(PeerId("server"), Fatal("x" * 120_000))
        assert client.counters.sent == 2
        assert client.counters.dropped == {"full": 18}
        server.admit([client.address])
        heard = 0
        give_up_s = time.monotonic() + 20
        while heard < 2:
            assert time.monotonic() < give_up_s
            for channel in (client, server):
                with contextlib.suppress(ChannelTimeout):
                    channel.receive(0.01)
                    heard += 1
        client.send(PeerId("server"), Fatal("x" * 1_000_000))
        assert server.receive(10).num_bytes > 1_000_000, "one message may wait however long it is"


def test_who_does_not_read_has_no_more_waiting_for_it_than_a_bound() -> None:
    """ZeroMQ counts messages: as many as the bound is of 64 KiB each, beside what the kernel holds.

    No heartbeats: whose ZeroMQ has stopped reading may be ended by one.
    """
    most, num_sent = 10 << 16, 800
    options = ZmqOptions(local_lanes=False, max_unsent_bytes=most, heartbeat_interval_s=60.0)
    server, keys = ZmqChannel(PeerId("server"), options=options), KeyPair.generate()
    member = ZmqChannel(PeerId("member"), keys=keys)
    server.admit([member.address])
    member.close()
    with (
        contextlib.closing(server),
        raw_dealer(server, keys, {zmq.RCVHWM: 1, zmq.RCVBUF: 1 << 16}) as dealer,
    ):
        dealer.send(encode(Ping(1)))
        assert server.receive(10).message == Ping(1)
        for _ in range(num_sent):
            server.send(PeerId("member"), Fatal("x" * 60_000))
        assert server.counters.sent + server.counters.dropped["full"] == num_sent
        assert 10 <= server.counters.sent <= 300


def test_a_link_that_breaks_is_reported_to_be_lost_and_to_stand_again() -> None:
    options = ZmqOptions(local_lanes=False)
    client, server = (ZmqChannel(PeerId(name), options=options) for name in ("client", "server"))
    with contextlib.closing(client), contextlib.closing(server):
        server.admit([client.address])
        wire = Wire(server.address)
        with contextlib.closing(wire):
            client.connect(wire.address)
            for number in range(3):
                client.send(PeerId("server"), Ping(number))
                assert server.receive(10).message == Ping(number)
                with pytest.raises(ChannelTimeout):
                    client.receive(0.05)  # the first time it stands is no news
                wire.cut(is_open=True)
                assert [client.receive(10).message for _ in range(2)] == [PeerLost(), PeerFound()]
            wire.cut(is_open=False)
            assert client.receive(10).message == PeerLost()
            with pytest.raises(ChannelTimeout):
                client.receive(4.0)  # the link is made anew meanwhile, to no avail
            wire.cut(is_open=True)
            assert client.receive(10).message == PeerFound()
            client.send(PeerId("server"), Ping(7))
            assert server.receive(10).message == Ping(7)


def test_a_message_as_long_as_may_be_comes_through_and_a_longer_one_ends_the_link() -> None:
    most = 70_000
    options = ZmqOptions(local_lanes=False, max_received_bytes=most)
    server = ZmqChannel(PeerId("server"), options=options)
    frame_bytes = len(encode(Fatal("x" * 69_000))) - 69_000
    keys = KeyPair.generate()
    member = ZmqChannel(PeerId("member"), keys=keys)
    server.admit([member.address])
    member.close()
    with contextlib.closing(server), raw_dealer(server, keys) as dealer:
        dealer.send(encode(Fatal("x" * (most - frame_bytes))))
        assert server.receive(10).num_bytes == most
        monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            dealer.send(encode(Fatal("x" * 80_000)))
            assert monitor.poll(10_000), "the link stands"
        finally:
            dealer.disable_monitor()
            monitor.close()
        unheard(server, 0.5)


def test_rubbish_does_not_keep_who_will_not_wait() -> None:
    keys = KeyPair.generate()
    with channels("server") as (server,):
        member = ZmqChannel(PeerId("member"), keys=keys)
        server.admit([member.address])
        member.close()
        with raw_dealer(server, keys) as dealer:
            dealer.send(encode(Ping(0)))
            assert server.receive(10).message == Ping(0)
            for _ in range(64):
                dealer.send(b"x" * 60_000)
            dealer.send(encode(Ping(1)))
            while len(server._inbox) < 65:
                take_in(server)
            num_calls = 0
            while True:
                num_calls += 1
                with contextlib.suppress(ChannelTimeout):
                    assert server.receive(0).message == Ping(1)
                    break
            assert num_calls > 10
            assert server.counters.dropped["malformed"] == 64


@pytest.mark.parametrize("what_breaks", ["caller", "link"])
def test_a_process_that_does_not_read_for_a_while_outlives_what_has_piled_up(what_breaks: str) -> None:
    command = [sys.executable, "-m", "tests.specdec.transport.stalled_peer", what_breaks]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no ::1")
def test_over_ipv6_members_alone_are_let_in_whatever_their_own_address() -> None:
    server = ZmqChannel(PeerId("server"), host="::1")
    with contextlib.closing(server), channels("member", "stranger") as (member, stranger):
        assert server.address.endpoint.startswith("tcp://[::1]:")
        server.admit([member.address])
        for client in (stranger, member):
            client.connect(server.address)
            client.send(PeerId("server"), Ping(1))
        assert server.receive(10).sender == "member"
        unheard(server)
        assert server.counters.dropped["refused_link"] >= 1
        server.send(PeerId("member"), Ping(2))
        assert member.receive(10).message == Ping(2)
