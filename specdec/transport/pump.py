"""Puts a channel into a thread of its own, so that several threads and event loops can share it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from specdec.core.errors import ChannelClosed, ChannelTimeout, ProtocolError
from specdec.transport.base import Channel, Envelope, PeerAddress, PeerId
from specdec.transport.messages import Message

logger = logging.getLogger(__name__)


class ChannelPump:
    """Owns a channel: sends what any thread hands over, and passes on what arrives."""

    def __init__(self, channel: Channel, *, name: str = "channel") -> None:
        self._channel = channel
        self._on_arrival: Callable[[Envelope], None] | None = None
        self._on_tick: Callable[[], None] | None = None
        self._tick_s = 1.0
        self._next_tick_s = 0.0
        self._orders: deque[Callable[[], None]] = deque()
        self._stopping = False
        self._flush_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"{name}-pump", daemon=True)

    @property
    def channel(self) -> Channel:
        """The channel; only its any-thread methods may be called."""
        return self._channel

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def start(
        self,
        on_arrival: Callable[[Envelope], None],
        *,
        on_tick: Callable[[], None] | None = None,
        tick_s: float = 1.0,
    ) -> None:
        """Begin.

        `on_arrival` runs in the pump's thread and must be quick; for asyncio give it a function that calls
        `loop.call_soon_threadsafe`. `on_tick` runs there too, about every `tick_s`.
        """
        self._on_arrival, self._on_tick, self._tick_s = on_arrival, on_tick, tick_s
        self._thread.start()

    def send(self, peer_id: PeerId, message: Message) -> None:
        """Send in order, from any thread; silently nothing after `close`."""
        self._order(lambda: self._channel.send(peer_id, message))

    def connect(self, peer: PeerAddress) -> None:
        """Open a link, from any thread."""
        self._order(lambda: self._channel.connect(peer))

    def disconnect(self, peer_id: PeerId) -> None:
        """Close a link, from any thread."""
        self._order(lambda: self._channel.disconnect(peer_id))

    def close(self, flush_s: float = 0.0) -> None:
        """Send what was handed over, close the channel, and wait for the thread."""
        self._flush_s = flush_s
        self._stopping = True
        self._channel.wake()
        if self._thread.ident is None:  # never started: the channel is still this thread's
            self._channel.close(flush_s)
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._channel.wake()

    def _run(self) -> None:
        assert self._on_arrival is not None
        try:
            while not self._stopping:
                self._obey()
                self._tick()
                with contextlib.suppress(ChannelTimeout):
                    self._on_arrival(self._channel.receive(self._tick_s))
            self._obey()
        except ChannelClosed:
            return
        except Exception:
            logger.exception("a channel's thread failed; the channel closes")
            raise
        finally:
            self._channel.close(self._flush_s)

    def _tick(self) -> None:
        now_s = time.monotonic()
        if self._on_tick is not None and now_s >= self._next_tick_s:
            self._next_tick_s = now_s + self._tick_s
            self._on_tick()

    def _obey(self) -> None:
        while self._orders:
            try:
                self._orders.popleft()()
            except ProtocolError as error:
                # Only the sender of an oversized message knows what it was; all others go on.
                logger.error("message not sent: %s", error)
                self._channel.counters.dropped["too_large"] += 1
