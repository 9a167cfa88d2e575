"""Channels over ZeroMQ with CURVE: encrypted, and open to current members only.

Every channel binds one ROUTER, where admitted peers open links, and makes one DEALER per peer that it
connects to; replies travel back on the link they were asked on. The kernel of trust is the public key: a
peer's name is looked up from the key that CURVE has verified, never read from what the peer says of itself.
A key that is no longer admitted is unheard at once, although its connection may stand a while.

ZeroMQ's own I/O threads answer heartbeats, so a peer that computes for long is not taken for dead.

After a refused handshake ZeroMQ may or may not try again (libzmq issues 2329 and 3519), so links do
it themselves: one that is not up is made anew, with what was sent on it, from within `receive`.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import zmq

from specdec.core.errors import ChannelClosed, ChannelTimeout, MessageTooLong, ProtocolError, ResourceError
from specdec.transport.base import (
    MAX_MESSAGE_BYTES,
    MAX_QUEUED_BYTES,
    MAX_UNSENT_BYTES,
    ChannelCounters,
    Envelope,
    LinkNews,
    PeerAddress,
    PeerId,
    PeerLost,
)
from specdec.transport.inbox import TURN_BYTES, Inbox
from specdec.transport.messages import (
    LaneMoved,
    LaneOffer,
    Message,
    WrongVersion,
    decode,
    encode,
    is_of_channels,
)
from specdec.transport.zmq_gate import Gate
from specdec.transport.zmq_lanes import Lanes
from specdec.transport.zmq_link import CONNECT_TIMEOUT_S, EVENTS, FIRST_RETRY_S, MAX_RETRY_S, Caller, Link

_ZAP_DOMAIN: Final = "drafthouse"
_MOST_AT_A_TIME: Final = 512
"""Frames taken from one socket before others, and this channel's owner, have their turn."""
_MOST_BYTES_AT_A_TIME: Final = 64 << 20
"""The same in bytes: a tenth of a second of copying, or less."""
_ENVELOPE_BYTES: Final = 64
"""What CURVE adds to a frame, which counts for ZeroMQ's own bound, and more."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair (Z85 text). The secret is made in this process and stays in it."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> KeyPair:
        """Return a fresh pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def __reduce__(self) -> str:
        raise TypeError("a CURVE secret does not leave its process")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZmqOptions:
    """Limits and times of a channel."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_received_bytes: int | None = None
    """Longest message that others may send, where that is less; who sends a longer one is cut off."""
    max_queued_messages: int = 10_000
    """Per peer and direction; beyond it messages are dropped and counted. Those that arrive are
    counted as they are taken in, in `receive`."""
    max_queued_bytes: int = MAX_QUEUED_BYTES
    """Of what has arrived from one peer and has not been read."""
    max_unsent_bytes: int = MAX_UNSENT_BYTES
    """Of what is to be sent to one peer and has not left: by its lane, or by a link that is not up. ZeroMQ,
    which does not count bytes, holds beside that as many messages as it would be of 64 KiB each; ordinary
    ones are far shorter."""
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 4.0
    """A link that is silent for so long counts as broken."""
    local_lanes: bool = True
    """Whether peers on the same machine send past ZeroMQ, see `transport.lane`."""


class ZmqChannel:
    """A `Channel` over TCP.

    What has arrived is kept as it came and understood when it is its turn to be read: whoever sends more
    than is read costs the bytes of its queue, and no time but its own.
    """

    def __init__(
        self,
        peer_id: PeerId,
        *,
        host: str = "127.0.0.1",
        keys: KeyPair | None = None,
        options: ZmqOptions | None = None,
    ) -> None:
        """Bind an ephemeral port on `host`.

        Raises:
            ResourceError: the address cannot be bound.
        """
        self._keys = keys or KeyPair.generate()
        self._options = options or ZmqOptions()
        self._counters = ChannelCounters()
        self._admitted: dict[str, PeerId] = {}
        self._callers: dict[PeerId, Caller] = {}
        self._links: dict[PeerId, Link] = {}
        self._inbox: Inbox[bytes | LinkNews] = Inbox(
            max_items=self._options.max_queued_messages, max_bytes=self._options.max_queued_bytes
        )
        self._num_read = 0
        """Bytes read from the inbox since the sockets were last looked at."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gate(self._context, lambda key: key in self._admitted, self._note_refusal)
        self._events = select.epoll()
        self._events.register(self._wake_fd, select.EPOLLIN)
        self._is_due = True
        """Whether ZeroMQ's sockets must be looked at before waiting: the descriptor that stands for one tells
        of news only once, and sending on a socket may have taken the notice."""
        self._has_more = False
        """Whether the last look at them may have left something there."""
        self._lanes: Lanes[Link | Caller] = Lanes(
            self._events,
            send_by_zmq=self._send_by_zmq,
            take=self._take_from_lane,
            max_frame_bytes=self._max_received_bytes,
            max_queued=self._options.max_queued_messages,
            max_queued_bytes=self._options.max_unsent_bytes,
        )
        self._closed = False
        wanted = f"tcp://{_bracketed(host)}:*"
        self._router = self._socket(zmq.ROUTER, wanted)
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        try:
            self._router.bind(wanted)
        except zmq.ZMQError as error:
            self.close()
            raise ResourceError(f"cannot bind a channel to {host}: {error}") from error
        self._events.register(self._router.fileno(), select.EPOLLIN)
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._address = PeerAddress(peer_id=peer_id, endpoint=endpoint, public_key=self._keys.public)

    @property
    def address(self) -> PeerAddress:
        """How others reach this channel."""
        return self._address

    @property
    def counters(self) -> ChannelCounters:
        """Live counters."""
        return self._counters

    @property
    def _max_received_bytes(self) -> int:
        options = self._options
        return min(options.max_message_bytes, options.max_received_bytes or options.max_message_bytes)

    @property
    def num_lanes(self) -> int:
        """Links on which frames go past ZeroMQ in both directions."""
        return self._lanes.num_open

    def connect(self, peer: PeerAddress) -> None:
        """Open a link; see `Channel.connect`."""
        self._require_open()
        known = self._links.get(peer.peer_id)
        if known is not None and known.address == peer:
            return
        self.disconnect(peer.peer_id)
        self._links[peer.peer_id] = self._open_link(peer)

    def disconnect(self, peer_id: PeerId) -> None:
        """Close a link; see `Channel.disconnect`."""
        link = self._links.pop(peer_id, None)
        if link is not None:
            self._close_link(link)

    def admit(self, peers: Iterable[PeerAddress]) -> None:
        """Replace the set of peers that may open links (any thread)."""
        self._admitted = {peer.public_key: peer.peer_id for peer in peers}

    def send(self, peer_id: PeerId, message: Message) -> None:
        """Queue a message; see `Channel.send`."""
        self._require_open()
        frame = encode(message)
        if len(frame) > self._options.max_message_bytes:
            raise MessageTooLong(len(frame), self._options.max_message_bytes)
        link = self._links.get(peer_id) or self._callers.get(peer_id)
        if link is None:
            self._counters.dropped["unknown_peer"] += 1
            return
        try:
            if not self._lanes.try_send(link, frame):
                self._send_by_zmq(link, frame)
        except (zmq.Again, BlockingIOError):
            self._counters.dropped["full"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # The peer's own link is gone; it will open another when it wants to hear from us.
            self._lanes.drop(link)
            self._callers.pop(peer_id, None)
            self._counters.dropped["unknown_peer"] += 1
        else:
            self._counters.sent += 1

    def _send_by_zmq(self, link: Link | Caller, frame: bytes) -> None:
        self._is_due = True
        link.send(frame)

    def receive(self, timeout_s: float | None) -> Envelope:
        """Return the next arrival; see `Channel.receive`. Peers take turns, by bytes (`Inbox`).

        What cannot be understood is passed over, but does not keep the caller for longer than a turn takes.
        """
        self._require_open()
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        num_passed_over = 0
        while True:
            if self._num_read >= TURN_BYTES:
                # Somebody may have come meanwhile who has sent little, and comes before what waits here.
                self._num_read = 0
                self._renew_links()
                self._note_events(0.0)
                self._look_at_sockets()
            while self._inbox:
                sender, arrived, num_bytes = self._inbox.take()
                self._num_read += num_bytes
                message = self._decode(arrived) if isinstance(arrived, bytes) else arrived
                if message is not None:
                    self._counters.received += 1
                    return Envelope(sender=sender, message=message, num_bytes=num_bytes)
                num_passed_over += num_bytes
                if num_passed_over >= TURN_BYTES:
                    break
            if num_passed_over >= TURN_BYTES and time.monotonic() >= until_s:
                raise ChannelTimeout(f"only what cannot be understood arrived at {self._address.peer_id}")
            if self._inbox:
                continue
            next_s = min(until_s, self._renew_links())
            self._look_at_sockets()
            if self._inbox:
                continue
            woken = self._await_events(next_s)
            self._look_at_sockets()
            if not self._inbox and (woken or time.monotonic() >= until_s):
                raise ChannelTimeout(f"nothing arrived at {self._address.peer_id} within {timeout_s} s")

    def wake(self) -> None:
        """Make a waiting `receive` return early (any thread)."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self, flush_s: float = 0.0) -> None:
        """Close all links; see `Channel.close`."""
        if self._closed:
            return
        self._closed = True
        linger_ms = int(flush_s * 1000)
        self._lanes.close(flush_s)
        for link in self._links.values():
            link.close(linger_ms)
        self._links.clear()
        self._router.close(linger_ms)
        self._gate.close()
        self._context.term()
        self._events.close()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _note_refusal(self) -> None:
        self._counters.dropped["refused_link"] += 1

    def _require_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"channel {self._address.peer_id} is closed")

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        """Return a socket that may be bound or connected to an endpoint."""
        socket = self._context.socket(kind)
        options = self._options
        socket.setsockopt(zmq.LINGER, 0)
        most_unsent = min(options.max_queued_messages, options.max_unsent_bytes // TURN_BYTES)
        socket.setsockopt(zmq.SNDHWM, max(1, most_unsent))
        # Where ZeroMQ has stopped reading a link, because its queue is full, the next heartbeat may end the
        # whole process (libzmq 4.3.5, issues 3937 and 4767). So it reads on; what is too much is dropped when
        # it is taken in.
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_received_bytes + _ENVELOPE_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(options.heartbeat_interval_s * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(options.heartbeat_timeout_s * 1000))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        if _is_ipv6(endpoint):
            # Not for all: the address of an IPv4 socket that may do both would be a mapped one, of no host.
            socket.setsockopt(zmq.IPV6, 1)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        return socket

    def _open_link(self, peer: PeerAddress) -> Link:
        socket = self._socket(zmq.DEALER, peer.endpoint)
        socket.setsockopt(zmq.CURVE_SERVERKEY, peer.public_key.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, int(FIRST_RETRY_S * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(MAX_RETRY_S * 1000))
        monitor = socket.get_monitor_socket(EVENTS)
        socket.connect(peer.endpoint)
        for source in (socket, monitor):
            self._events.register(source.fileno(), select.EPOLLIN)
        self._is_due = True
        return Link(
            peer,
            socket,
            monitor,
            max_unsent_bytes=self._options.max_unsent_bytes,
            renew_at_s=time.monotonic() + CONNECT_TIMEOUT_S,
        )

    def _close_link(self, link: Link) -> None:
        self._lanes.drop(link)
        for source in (link.socket, link.monitor):
            self._events.unregister(source.fileno())
        link.close(linger_ms=0)

    def _renew_links(self) -> float:
        """Make links anew whose time has come; return when the next one's will come."""
        next_s = math.inf
        for peer_id, link in self._links.items():
            if link.is_up:
                continue
            if link.renew_at_s <= time.monotonic():
                self._close_link(link)
                renewed = self._links[peer_id] = self._open_link(link.address)
                renewed.retry_s = min(2 * link.retry_s, MAX_RETRY_S)
                renewed.is_lost = link.is_lost
                for frame in link.unsent:
                    renewed.send(frame)
                link = renewed
            next_s = min(next_s, link.renew_at_s)
        return next_s

    def _await_events(self, until_s: float) -> bool:
        """Wait for anything to happen, and see to it; return whether another thread woke us."""
        wait_s = None if until_s == math.inf else max(0.0, until_s - time.monotonic())
        if self._has_more or self._is_due:  # what was sent last may have taken the notice of what came
            wait_s = 0.0
        woken = self._note_events(wait_s)
        if woken:
            os.eventfd_read(self._wake_fd)
        return woken

    def _note_events(self, wait_s: float | None) -> bool:
        """See to what happens within a time; return whether another thread wants to wake us."""
        woken = False
        for fd, _ in self._events.poll(wait_s):
            if self._lanes.attend(fd):
                continue
            if fd == self._wake_fd:
                woken = True
            else:
                self._is_due = True
        return woken

    def _look_at_sockets(self) -> None:
        """Take in what ZeroMQ has for us, behind what came by the lanes, if there may be something."""
        if not (self._is_due or self._has_more):
            return
        self._is_due = self._has_more = False
        for caller in self._callers.values():
            self._lanes.read(caller)
        self._drain_router()
        for link in self._links.values():
            self._lanes.read(link)
            self._drain_link(link)
            self._follow_link(link)

    def _follow_link(self, link: Link) -> None:
        """Report a link that broke, or is there again; offer a lane on one that has come up."""
        for news in link.note_events():
            if isinstance(news, PeerLost):
                self._lanes.drop(link)
            self._inbox.put(link.peer_id, news, 0)
        if link.is_up and link.lane is None and self._options.local_lanes and self._is_near(link.address):
            self._lanes.offer(link)

    def _is_near(self, peer: PeerAddress) -> bool:
        """Whether a peer shares our network: loopback is loopback, and nobody else has our address."""
        return _host(peer.endpoint) == _host(self._address.endpoint)

    def _drain_router(self) -> None:
        """Take in some of what callers have sent; they take turns in the router's queue."""
        num_bytes = 0
        for _ in range(_MOST_AT_A_TIME):
            if num_bytes >= _MOST_BYTES_AT_A_TIME:
                break
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            key = str(frames[-1].get("User-Id"))
            sender = self._admitted.get(key)
            if sender is None:
                self._counters.dropped["foreign"] += 1
            elif len(frames) != 2:
                self._counters.dropped["malformed"] += 1
            else:
                frame = frames[1].buffer
                num_bytes += len(frame)
                self._take(self._caller(sender, key, frames[0].bytes), frame)
        self._has_more = True

    def _caller(self, peer_id: PeerId, public_key: str, route: bytes) -> Caller:
        """Return who has spoken, noting the link on which to answer."""
        caller = self._callers.get(peer_id)
        if caller is None or (caller.route, caller.public_key) != (route, public_key):
            if caller is not None:
                self._lanes.read(caller)
                self._lanes.drop(caller)
            caller = self._callers[peer_id] = Caller(peer_id, public_key, self._router, route)
        return caller

    def _drain_link(self, link: Link) -> None:
        """Take in some of what the peer of a link has sent, as `_drain_router` does."""
        num_bytes = 0
        for _ in range(_MOST_AT_A_TIME):
            if num_bytes >= _MOST_BYTES_AT_A_TIME:
                break
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 1:
                self._counters.dropped["malformed"] += 1
            else:
                num_bytes += len(frames[0])
                self._take(link, frames[0])
        self._has_more = True

    def _decode(self, frame: bytes | memoryview) -> Message | None:
        try:
            return decode(frame)
        except WrongVersion:
            self._counters.dropped["version"] += 1
        except ProtocolError:
            self._counters.dropped["malformed"] += 1
        return None

    def _take_from_lane(self, link: Link | Caller, frame: bytes) -> None:
        if isinstance(link, Caller) and self._admitted.get(link.public_key) != link.peer_id:
            self._counters.dropped["foreign"] += 1
        else:
            self._take(link, frame)

    def _take(self, link: Link | Caller, frame: bytes | memoryview) -> None:
        """Obey what channels say to each other, keep the rest for `receive`, as far as there is room.

        Who sends on and on must not have more in memory than others: what is too much is dropped unread.
        """
        if is_of_channels(frame):
            match self._decode(frame):
                case LaneOffer() as offer:
                    if self._options.local_lanes:
                        self._lanes.take_up(link, offer)
                case LaneMoved(name=name):
                    self._lanes.note_moved(link, name)
        elif self._inbox.has_room(link.peer_id, len(frame)):
            self._inbox.put(link.peer_id, bytes(frame), len(frame))
        else:
            self._counters.dropped["full"] += 1


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _host(endpoint: str) -> str:
    """The part of `tcp://HOST:PORT` that names the machine."""
    return endpoint.rpartition(":")[0]


def _is_ipv6(endpoint: str) -> bool:
    return _host(endpoint).endswith("]")
