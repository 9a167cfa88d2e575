"""The simulated network does to messages what it is told to, the same way for the same seed."""

from __future__ import annotations

import contextlib
import threading

import pytest

from specdec.core.clock import ManualClock
from specdec.core.errors import ChannelTimeout
from specdec.transport.base import PeerFound, PeerId, PeerLost
from specdec.transport.memory import Faults, MemoryChannel, MemoryNetwork
from specdec.transport.messages import Fatal, Ping, encode

SERVER, CLIENT = PeerId("server"), PeerId("client")


def pair(faults: Faults, seed: int = 0) -> tuple[MemoryNetwork, MemoryChannel, MemoryChannel]:
    network = MemoryNetwork(faults=faults, seed=seed, clock=ManualClock())
    server, client = network.open(SERVER), network.open(CLIENT)
    server.admit([client.address])
    client.connect(server.address)
    return network, server, client


def arrivals(faults: Faults, seed: int = 0, count: int = 200) -> list[int]:
    network, server, client = pair(faults, seed)
    for nonce in range(count):
        client.send(SERVER, Ping(nonce))
    network.run_for(10.0)
    heard = []
    while True:
        try:
            message = server.receive(0).message
        except ChannelTimeout:
            return heard
        assert isinstance(message, Ping)
        heard.append(message.nonce)


def test_without_faults_everything_arrives_at_once() -> None:
    assert arrivals(Faults()) == list(range(200))


def test_delay_takes_simulated_time_only() -> None:
    network, server, client = pair(Faults(delay_s=(3.0, 3.0)))
    client.send(SERVER, Ping(1))
    with pytest.raises(ChannelTimeout):
        server.receive(2.0)
    assert server.receive(2.0).message == Ping(1)
    assert network.clock.now_s() == 3.0


def test_loss_duplication_and_reordering() -> None:
    lossy = arrivals(Faults(loss=0.3))
    assert 100 < len(lossy) < 180
    assert lossy == sorted(lossy)
    doubled = arrivals(Faults(duplication=0.3))
    assert 230 < len(doubled) < 300
    ordered = arrivals(Faults(delay_s=(0.0, 1.0)))
    assert ordered == list(range(200))
    shuffled = arrivals(Faults(delay_s=(0.0, 1.0), in_order=False))
    assert shuffled != ordered
    assert sorted(shuffled) == ordered


def test_the_seed_decides_everything() -> None:
    faults = Faults(delay_s=(0.0, 1.0), in_order=False, loss=0.2, duplication=0.2)
    assert arrivals(faults, seed=1) == arrivals(faults, seed=1) != arrivals(faults, seed=2)


def test_services_answer_while_a_client_waits() -> None:
    network, server, client = pair(Faults(delay_s=(0.1, 0.2)))

    def echo() -> None:
        envelope = server.receive(0)
        assert isinstance(envelope.message, Ping)
        server.send(envelope.sender, Ping(envelope.message.nonce + 1))

    network.serve(SERVER, echo)
    for nonce in range(10):
        client.send(SERVER, Ping(nonce))
        assert client.receive(1.0).message == Ping(nonce + 1)
    assert 2.0 <= network.clock.now_s() <= 4.0


def test_a_scheduled_death_is_noticed_and_a_successor_is_another_peer() -> None:
    network, server, client = pair(Faults())
    network.schedule(1.0, lambda: network.kill(SERVER))
    assert client.receive(5.0).message == PeerLost()
    successor = network.open(SERVER)
    successor.admit([client.address])
    assert successor.address != server.address
    client.connect(successor.address)
    client.send(SERVER, Ping(1))
    assert successor.receive(1.0).message == Ping(1)


def test_a_link_that_breaks_loses_what_arrives_and_is_reported_to_stand_again() -> None:
    network, server, client = pair(Faults(delay_s=(0.1, 0.1)))
    client.send(SERVER, Ping(1))
    network.break_link(CLIENT, SERVER, 1.0)
    network.schedule(0.5, lambda: network.break_link(SERVER, CLIENT, 1.0))  # twice at a time is once
    assert client.receive(0).message == PeerLost()
    for nonce in range(2, 22):
        network.run_for(0.1)
        client.send(SERVER, Ping(nonce))
        server.send(CLIENT, Ping(nonce))  # until it has been heard, nobody knows the client
    network.run_for(1.0)
    nonces, told = [], []
    with contextlib.suppress(ChannelTimeout):
        while True:
            message = server.receive(0).message
            assert isinstance(message, Ping)
            nonces.append(message.nonce)
    with contextlib.suppress(ChannelTimeout):
        while True:
            told.append(client.receive(0).message)
    assert nonces == [*range(nonces[0], 22)]
    assert 1.35 < 0.1 * (nonces[0] - 1) <= 1.55, "sent a tenth of a second before it arrived"
    assert told[0] == PeerFound()
    assert PeerLost() not in told


def test_a_link_to_whom_there_is_no_more_does_not_stand_again() -> None:
    network, _, client = pair(Faults())
    network.break_link(CLIENT, SERVER, 1.0)
    network.kill(SERVER)
    network.open(SERVER)
    network.run_for(2.0)
    assert [client.receive(0).message for _ in range(2)] == [PeerLost(), PeerLost()]
    with pytest.raises(ChannelTimeout):
        client.receive(0)


def test_malformed_and_old_frames_are_counted_and_dropped() -> None:
    _, server, client = pair(Faults())
    old = bytearray(encode(Ping(1)))
    old[2] = 0
    for frame in (b"rubbish", b"", bytes(old), encode(Ping(1))[:4]):
        client.inject(SERVER, frame)
    client.send(SERVER, Ping(2))
    assert server.receive(1.0).message == Ping(2)
    assert server.counters.dropped == {"malformed": 3, "version": 1}


def test_who_sends_little_does_not_wait_for_who_sends_much() -> None:
    network = MemoryNetwork(clock=ManualClock())
    server, noisy, quiet = (network.open(PeerId(name)) for name in ("server", "noisy", "quiet"))
    server.admit([noisy.address, quiet.address])
    for client in (noisy, quiet):
        client.connect(server.address)
    for _ in range(70):
        noisy.send(PeerId("server"), Fatal("x" * (1 << 20)))
    quiet.send(PeerId("server"), Ping(7))
    network.run_for(1.0)
    assert [server.receive(0).sender for _ in range(3)] == ["noisy", "quiet", "noisy"]
    assert server.counters.dropped == {"full": 7}, "64 MiB of one peer are enough"


def test_threads_in_real_time() -> None:
    network = MemoryNetwork(faults=Faults(delay_s=(0.0, 0.002)))
    server, client = network.open(SERVER), network.open(CLIENT)
    server.admit([client.address])
    client.connect(server.address)

    def echo() -> None:
        for _ in range(50):
            envelope = server.receive(10)
            assert isinstance(envelope.message, Ping)
            server.send(envelope.sender, envelope.message)

    thread = threading.Thread(target=echo)
    thread.start()
    for nonce in range(50):
        client.send(SERVER, Ping(nonce))
        assert client.receive(10).message == Ping(nonce)
    thread.join()
