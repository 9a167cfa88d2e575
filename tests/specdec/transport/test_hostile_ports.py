"""Raw bytes at the ports of channels: nothing is delivered, nothing breaks, members are served afterwards."""

from __future__ import annotations

import contextlib
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from specdec.core.errors import ChannelTimeout
from specdec.transport.base import Channel, PeerId
from specdec.transport.messages import Ping, encode
from specdec.transport.torch_dist import TorchDistChannel
from specdec.transport.zmq import ZmqChannel, ZmqOptions
from tests.rubbish import throw
from tests.specdec.transport.echo_peer import echo_process

SERVER, CLIENT, ECHO = PeerId("server"), PeerId("client"), PeerId("echo")


def greeting(mechanism: bytes, *, as_server: bool = False) -> bytes:
    """The first 64 bytes of ZeroMQ's protocol, version 3.1."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return b"\x04" + bytes([len(content)]) + content if len(content) < 256 else (
        b"\x06" + struct.pack(">Q", len(content)) + content
    )  # fmt: skip


def rubbish(generator: random.Random) -> Iterator[bytes]:
    """What is sent on one connection, piece by piece."""

    def noise(most: int) -> bytes:
        return generator.randbytes(generator.randrange(1, most))

    kind = generator.randrange(9)
    if kind == 0:
        yield noise(2000)
    elif kind == 1:
        yield b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    elif kind == 2:
        yield (
            greeting(b"NULL") + command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06DEALER") + encode(Ping(1))
        )
    elif kind == 3:
        yield greeting(b"CURVE")
        yield command(b"HELLO", b"\x01\x00" + bytes(72) + noise(113).ljust(112, b"x"))
        yield command(b"INITIATE", noise(400))
    elif kind == 4:
        yield greeting(generator.choice([b"PLAIN", b"CURVE", b"GSSAPI", noise(20)]))
        for _ in range(5):
            yield command(generator.choice([b"HELLO", b"PING", b"ERROR", b"READY", noise(9)]), noise(300))
    elif kind == 5:
        yield greeting(b"CURVE")[: generator.randrange(64)]
    elif kind == 6:
        yield b"\x02" + struct.pack(">Q", 1 << 62) + noise(64)
    elif kind == 7:
        yield noise(1 << 17)
    else:
        frame = bytearray(encode(Ping(generator.getrandbits(30))))
        frame[generator.randrange(len(frame))] ^= 1 << generator.randrange(8)
        yield bytes(frame)


@contextlib.contextmanager
def throwing(endpoint: str, num_connections: int) -> Iterator[None]:
    thread = threading.Thread(target=throw, args=(endpoint, num_connections, rubbish))
    thread.start()
    yield
    thread.join(600)
    assert not thread.is_alive()


def check_served(server: Channel, open_client: Callable[[], Channel]) -> None:
    client = open_client()
    try:
        server.admit([client.address])
        client.connect(server.address)
        client.send(SERVER, Ping(1))
        until_s = time.monotonic() + 30
        while True:
            with contextlib.suppress(ChannelTimeout):
                assert server.receive(0.1).message == Ping(1)
                return
            with contextlib.suppress(ChannelTimeout):
                client.receive(0.01)
            assert time.monotonic() < until_s
    finally:
        client.close()


COUNTS = [40, pytest.param(10_000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]


@pytest.mark.parametrize("num_connections", COUNTS)
def test_nothing_comes_through_a_port_of_zeromq(num_connections: int) -> None:
    server = ZmqChannel(SERVER, options=ZmqOptions(max_message_bytes=1 << 16))
    try:
        with throwing(server.address.endpoint, num_connections), pytest.raises(ChannelTimeout):
            server.receive(1.0)
        check_served(server, lambda: ZmqChannel(CLIENT))
        assert server.counters.received == 1
    finally:
        server.close()


@pytest.mark.parametrize("num_connections", COUNTS)
def test_nothing_comes_through_the_door_of_gloo(num_connections: int) -> None:
    """In another process: it is PyTorch's store that listens."""
    client = TorchDistChannel(CLIENT)
    try:
        with echo_process(client.address) as (process, address):
            throw(address.endpoint, num_connections, rubbish)
            assert process.poll() is None
            client.admit([address])
            client.connect(address)
            client.send(ECHO, Ping(1))
            assert client.receive(30).message == Ping(1)
            assert process.poll() is None
    finally:
        client.close()
