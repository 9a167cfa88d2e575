"""The links of a `ZmqChannel`: those that it opened, and those that were opened to it."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from specdec.transport.base import LinkNews, PeerAddress, PeerFound, PeerId, PeerLost
from specdec.transport.lane import Lane

EVENTS: Final = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.DISCONNECTED
)
"""What a link's monitor must report."""
FIRST_RETRY_S: Final = 0.05
MAX_RETRY_S: Final = 1.0
CONNECT_TIMEOUT_S: Final = 2.0


@dataclass(slots=True)
class Caller:
    """A peer that has opened a link to us."""

    peer_id: PeerId
    public_key: str
    router: zmq.Socket[bytes]
    route: bytes
    lane: Lane | None = None

    def send(self, frame: bytes) -> None:
        """Hand a frame to the router.

        Raises:
            zmq.ZMQError: the queue is full, or the link is gone.
        """
        self.router.send_multipart((self.route, frame), zmq.NOBLOCK)


@dataclass(slots=True)
class Link:
    """A DEALER to one peer. While it is not up, what was sent on it is kept for its successor."""

    address: PeerAddress
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    max_unsent_bytes: int
    """Most bytes of `unsent`, unless it is one frame."""
    renew_at_s: float
    """When to make it anew, if it is not up by then."""
    retry_s: float = FIRST_RETRY_S
    is_up: bool = False
    is_lost: bool = False
    """Whether it was up once, and is reported to have broken since."""
    unsent: list[bytes] = field(default_factory=list)
    """What was handed to the socket while the link was not up: it has not left."""
    num_unsent_bytes: int = 0
    lane: Lane | None = None
    """Beside the socket, when the peer is near."""

    @property
    def peer_id(self) -> PeerId:
        """Who is at the other end."""
        return self.address.peer_id

    @property
    def public_key(self) -> str:
        """The peer's."""
        return self.address.public_key

    def send(self, frame: bytes) -> None:
        """Hand a frame to the socket.

        Raises:
            zmq.Again: its queue is full.
        """
        if self.is_up:
            self.socket.send(frame, zmq.NOBLOCK)
            return
        num_unsent = len(self.unsent)
        if num_unsent >= self.socket.get_hwm() or (
            num_unsent > 0 and self.num_unsent_bytes + len(frame) > self.max_unsent_bytes
        ):
            raise zmq.Again
        self.unsent.append(frame)
        self.num_unsent_bytes += len(frame)
        with contextlib.suppress(zmq.Again):  # a refused socket takes nothing, its successor will
            self.socket.send(frame, zmq.NOBLOCK)

    def note_events(self) -> list[LinkNews]:
        """Take in what happened to the connection; return what is to be reported of it, in order."""
        news: list[LinkNews] = []
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                if self.is_lost:
                    news.append(PeerFound())
                self.is_up, self.is_lost = True, False
                self.unsent.clear()
                self.num_unsent_bytes = 0
            elif self.is_up:  # ZeroMQ reconnects by itself, but perhaps to no avail
                news.append(PeerLost())
                self.is_up, self.is_lost = False, True
                self.retry_s = FIRST_RETRY_S
                self.renew_at_s = time.monotonic() + CONNECT_TIMEOUT_S
            else:
                self.renew_at_s = min(self.renew_at_s, time.monotonic() + self.retry_s)
        return news

    def close(self, linger_ms: int) -> None:
        """Close both sockets."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
