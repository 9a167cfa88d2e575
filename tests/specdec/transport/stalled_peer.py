"""A process whose channel nobody reads for a while; more has piled up by then than its queue may hold.

By itself, because what may go wrong ends the whole process: `python -m ... caller` or `... link`.
"""

from __future__ import annotations

import contextlib
import sys
import time

from specdec.core.errors import ChannelTimeout
from specdec.transport.base import PeerId
from specdec.transport.messages import Fatal
from specdec.transport.zmq import ZmqChannel, ZmqOptions

SERVER, CLIENT = PeerId("server"), PeerId("client")
NUM_SENT, QUEUED, ENOUGH = 1500, 8, 5000


def heard(channel: ZmqChannel, timeout_s: float) -> int:
    number = 0
    with contextlib.suppress(ChannelTimeout):
        while True:
            channel.receive(timeout_s)
            number += 1
    return number


def channel(name: PeerId, queued: int, silence_s: float) -> ZmqChannel:
    options = ZmqOptions(
        local_lanes=False,
        max_queued_messages=queued,
        heartbeat_interval_s=0.05,
        heartbeat_timeout_s=silence_s,
    )
    return ZmqChannel(name, options=options)


def meet(server: ZmqChannel, client: ZmqChannel) -> None:
    server.admit([client.address])
    client.connect(server.address)
    client.send(SERVER, Fatal("hello"))
    while heard(server, 0.01) == 0:
        heard(client, 0.01)


def server_whose_caller_dies() -> None:
    server, client = channel(SERVER, QUEUED, 9.0), channel(CLIENT, ENOUGH, 9.0)
    meet(server, client)
    for _ in range(NUM_SENT):
        client.send(SERVER, Fatal("x" * 200))
    time.sleep(0.1)
    client.close()
    time.sleep(0.3)  # several heartbeats
    assert heard(server, 0.1) > 0
    server.close()


def client_that_its_link_is_renewed_for() -> None:
    server, client = channel(SERVER, ENOUGH, 0.15), channel(CLIENT, QUEUED, 0.15)
    meet(server, client)
    for _ in range(NUM_SENT):
        server.send(CLIENT, Fatal("x" * 200))
    time.sleep(0.5)  # longer than a link may be silent
    assert heard(client, 0.1) > 0
    client.send(SERVER, Fatal("still here"))
    assert heard(server, 0.3) == 1
    client.close()
    server.close()


if __name__ == "__main__":
    {"caller": server_whose_caller_dies, "link": client_that_its_link_is_renewed_for}[sys.argv[1]]()
