"""All transports behind one face, for the contract suite."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest

from specdec.transport.base import Channel, PeerId
from specdec.transport.gloo_link import TorchDistOptions
from specdec.transport.memory import MemoryNetwork
from specdec.transport.torch_dist import TorchDistChannel
from specdec.transport.zmq import ZmqChannel, ZmqOptions
from tests.specdec.transport.gloo_pipe import gloo_lanes

OpenChannel = Callable[[str], Channel]
MAX_BYTES = 1 << 20


def has_ipv6_loopback() -> bool:
    """Whether a socket can be bound to ::1 here."""
    try:
        with socket.socket(socket.AF_INET6) as bound:
            bound.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.fixture(params=["memory", "zmq", "zmq_ipv6", "torch_dist", "device_lane"])
def open_channel(request: pytest.FixtureRequest) -> Iterator[OpenChannel]:
    """Opens channels of one kind that can reach each other; closes them at the end."""
    if request.param == "zmq_ipv6" and not has_ipv6_loopback():
        pytest.skip("this machine has no ::1")
    network = MemoryNetwork()
    opened: list[Channel] = []

    def open_one(name: str) -> Channel:
        channel: Channel
        if request.param == "memory":
            channel = network.open(PeerId(name), max_message_bytes=MAX_BYTES)
        elif request.param == "torch_dist":
            channel = TorchDistChannel(PeerId(name), options=TorchDistOptions(max_message_bytes=MAX_BYTES))
        elif request.param == "device_lane":
            channel = TorchDistChannel(
                PeerId(name),
                options=TorchDistOptions(max_message_bytes=MAX_BYTES),
                lanes=gloo_lanes(f"gpu of {name}"),
            )
        else:
            host = "::1" if request.param == "zmq_ipv6" else "127.0.0.1"
            channel = ZmqChannel(PeerId(name), host=host, options=ZmqOptions(max_message_bytes=MAX_BYTES))
        opened.append(channel)
        return channel

    yield open_one
    for channel in opened:
        channel.close()
