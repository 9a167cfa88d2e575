"""Raw bytes at the ports of channels: nothing is delivered, nothing breaks, members are served afterwards."""

from __future__ import annotations

import contextlib
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec.core.errors import ChannelTimeout
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.model.parallel import heartbeat
from specdec.model.parallel.group import RankGroup
from specdec.transport.base import Channel, PeerId
from specdec.transport.messages import Ping, encode
from specdec.transport.torch_dist import TorchDistChannel
from specdec.transport.zmq import ZmqChannel, ZmqOptions
from tests.architectures import save_model
from tests.rank_pool import BreakablePools
from tests.rubbish import throw
from tests.specdec.engine.ranked_engines import GREEDY, check, config_of, generate, lead
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


VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)
"""How PyTorch's store is greeted."""


def store_rubbish(generator: random.Random) -> Iterator[bytes]:
    """The same, or what begins as PyTorch's store wants it and goes on with questions that make no sense."""
    if generator.randrange(2):
        yield from rubbish(generator)
        return
    yield VALIDATE
    for _ in range(generator.randrange(1, 5)):
        length = generator.choice([0, 3, 1 << 20, 1 << 33, (1 << 64) - 1, generator.getrandbits(64)])
        yield bytes([generator.randrange(24)]) + struct.pack("<Q", length)
        yield generator.randbytes(generator.randrange(100))


def beats_on(group: RankGroup) -> bool:
    """Whether the other rank still shows that it runs, and this one can see it: by the store."""
    store, key = group.open_store(), heartbeat._key(1)
    before, until_s = store.get(key), time.monotonic() + 30
    while store.get(key) == before:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.1)
    return True


def serve_under_fire(group: RankGroup, config: EngineConfig, num_connections: int) -> Any:
    """Rank 0: all different answers to the same prompts, and what else went wrong meanwhile."""
    wrong: list[str] = []

    def fire() -> None:
        try:
            throw(f"tcp://{group._spec.store_host}:{group._spec.store_port}", num_connections, store_rubbish)
        except OSError as error:
            wrong.append(f"the port is gone: {error}")

    def use(engine: Engine) -> Any:
        thrower = threading.Thread(target=fire)
        thrower.start()
        answers = []
        while thrower.is_alive():
            answers.append(generate(engine, [GREEDY]))
        answers.append(generate(engine, [GREEDY]))
        if not beats_on(group):
            wrong.append("the other rank is silent")
        return [one for index, one in enumerate(answers) if one not in answers[:index]], wrong

    return lead(group, config, use)


@pytest.mark.parametrize(
    "num_connections", [40, pytest.param(2_000, marks=[pytest.mark.full, pytest.mark.timeout(1800)])]
)
def test_nothing_comes_through_the_store_where_ranks_meet(
    num_connections: int, breakable_pool: BreakablePools, tmp_path: Path
) -> None:
    """While they hold one model together, and show by the same store that they run."""
    save_model(tmp_path)
    with breakable_pool(2) as pool:
        right = check(pool, tmp_path, [GREEDY]).streams
        answers, wrong = pool.run(serve_under_fire, config_of(tmp_path, 2), num_connections)[0]
        assert not wrong
        assert answers == [right]
