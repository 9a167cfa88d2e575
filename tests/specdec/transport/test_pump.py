"""A channel shared by threads and an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from specdec.transport.base import Channel, Envelope, PeerId
from specdec.transport.messages import Fatal, Ping
from specdec.transport.pump import ChannelPump

OpenChannel = Callable[[str], Channel]


def test_many_threads_and_an_event_loop(open_channel: OpenChannel) -> None:
    server, client = open_channel("server"), open_channel("client")
    server.admit([client.address])
    server_pump = ChannelPump(server)
    server_pump.start(lambda envelope: server_pump.send(envelope.sender, envelope.message))  # type: ignore[arg-type]

    async def main() -> set[int]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Envelope] = asyncio.Queue()
        pump = ChannelPump(client)
        pump.start(lambda envelope: loop.call_soon_threadsafe(arrived.put_nowait, envelope) and None)
        pump.connect(server.address)

        def send(first: int) -> None:
            for nonce in range(first, first + 50):
                pump.send(PeerId("server"), Ping(nonce))

        threads = [threading.Thread(target=send, args=(first,)) for first in (0, 50, 100)]
        for thread in threads:
            thread.start()
        heard = set()
        for _ in range(150):
            message = (await asyncio.wait_for(arrived.get(), 10)).message
            assert isinstance(message, Ping)
            heard.add(message.nonce)
        for thread in threads:
            thread.join()
        await asyncio.to_thread(pump.close)
        return heard

    assert asyncio.run(main()) == set(range(150))
    server_pump.close()


def test_an_oversized_message_is_counted_and_the_pump_goes_on(open_channel: OpenChannel) -> None:
    server, client = open_channel("server"), open_channel("client")
    server.admit([client.address])
    pump = ChannelPump(client)
    pump.start(lambda envelope: None)
    pump.connect(server.address)
    pump.send(PeerId("server"), Fatal("x" * (2 << 20)))
    pump.send(PeerId("server"), Ping(1))
    assert server.receive(10).message == Ping(1)
    assert client.counters.dropped["too_large"] == 1
    pump.close()


def test_ticks_come_while_messages_flow(open_channel: OpenChannel) -> None:
    server, client = open_channel("server"), open_channel("client")
    server.admit([client.address])
    client.connect(server.address)
    ticked = threading.Event()
    pump = ChannelPump(server)
    pump.start(lambda envelope: None, on_tick=ticked.set, tick_s=0.01)
    assert ticked.wait(10)
    ticked.clear()
    client.send(PeerId("server"), Ping(1))
    assert ticked.wait(10)
    pump.close()
