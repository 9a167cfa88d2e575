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

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import zmq

from specdec.core.errors import ChannelClosed, ChannelTimeout, ProtocolError, ResourceError
from specdec.transport.base import (
    MAX_MESSAGE_BYTES,
    ChannelCounters,
    Envelope,
    PeerAddress,
    PeerId,
    PeerLost,
)
from specdec.transport.lane import Lane
from specdec.transport.messages import LaneMoved, LaneOffer, Message, WrongVersion, decode, encode
from specdec.transport.zmq_gate import Gate
from specdec.transport.zmq_link import CONNECT_TIMEOUT_S, EVENTS, FIRST_RETRY_S, MAX_RETRY_S, Caller, Link

logger = logging.getLogger(__name__)

_ZAP_DOMAIN: Final = "drafthouse"


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
    max_queued_messages: int = 10_000
    """Per link and direction; beyond it messages are dropped and counted."""
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 4.0
    """A link that is silent for so long counts as broken."""
    local_lanes: bool = True
    """Whether peers on the same machine send past ZeroMQ, see `transport.lane`."""


class ZmqChannel:
    """A `Channel` over TCP."""

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
        self._ready: deque[Envelope] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gate(self._context, lambda key: key in self._admitted, self._note_refusal)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._closed = False
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.setsockopt_string(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        try:
            self._router.bind(f"tcp://{_bracketed(host)}:*")
        except zmq.ZMQError as error:
            self.close()
            raise ResourceError(f"cannot bind a channel to {host}: {error}") from error
        self._poller.register(self._router, zmq.POLLIN)
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
            raise ProtocolError(f"a message of {len(frame)} bytes exceeds {self._options.max_message_bytes}")
        link = self._links.get(peer_id) or self._callers.get(peer_id)
        if link is None:
            self._counters.dropped["unknown_peer"] += 1
            return
        try:
            if not self._send_by_lane(link, frame):
                link.send(frame)
        except (zmq.Again, BlockingIOError):
            self._counters.dropped["full"] += 1
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # The peer's own link is gone; it will open another when it wants to hear from us.
            self._drop_lane(link)
            self._callers.pop(peer_id, None)
            self._counters.dropped["unknown_peer"] += 1
        else:
            self._counters.sent += 1

    def receive(self, timeout_s: float | None) -> Envelope:
        """Return the next arrival; see `Channel.receive`."""
        self._require_open()
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready:
            wait_s = min(until_s, self._renew_links()) - time.monotonic()
            # ZeroMQ waits in whole milliseconds: round up, so that short waits are waits.
            events = self._poller.poll(None if wait_s == math.inf else math.ceil(max(0.0, wait_s) * 1000))
            woken = self._drain({source for source, _ in events})
            if not self._ready and (woken or time.monotonic() >= until_s):
                raise ChannelTimeout(f"nothing arrived at {self._address.peer_id} within {timeout_s} s")
        self._counters.received += 1
        return self._ready.popleft()

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
        for lane in self._lanes():
            lane.close(flush_s)
        for link in self._links.values():
            link.close(linger_ms)
        self._links.clear()
        self._router.close(linger_ms)
        self._gate.close()
        self._context.term()
        with self._wake_lock:
            os.close(self._wake_fd)
            self._wake_fd = -1

    def _note_refusal(self) -> None:
        self._counters.dropped["refused_link"] += 1

    def _require_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"channel {self._address.peer_id} is closed")

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        options = self._options
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, options.max_queued_messages)
        socket.setsockopt(zmq.RCVHWM, options.max_queued_messages)
        socket.setsockopt(zmq.MAXMSGSIZE, options.max_message_bytes)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(options.heartbeat_interval_s * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(options.heartbeat_timeout_s * 1000))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        return socket

    def _open_link(self, peer: PeerAddress) -> Link:
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.CURVE_SERVERKEY, peer.public_key.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, int(FIRST_RETRY_S * 1000))
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(MAX_RETRY_S * 1000))
        monitor = socket.get_monitor_socket(EVENTS)
        socket.connect(peer.endpoint)
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return Link(peer, socket, monitor, renew_at_s=time.monotonic() + CONNECT_TIMEOUT_S)

    def _close_link(self, link: Link) -> None:
        self._drop_lane(link)
        self._poller.unregister(link.socket)
        self._poller.unregister(link.monitor)
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
                for frame in link.unsent:
                    renewed.send(frame)
                link = renewed
            next_s = min(next_s, link.renew_at_s)
        return next_s

    def _drain(self, sources: set[object]) -> bool:
        """Move everything that has arrived into `_ready`; return whether another thread woke us."""
        woken = False
        if self._wake_fd in sources:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            woken = True
        for caller in self._callers.values():
            self._attend_lane(caller, sources)
        if self._router in sources:
            self._drain_router()
        for link in self._links.values():
            self._attend_lane(link, sources)
            if link.socket in sources:
                self._drain_link(link)
            if link.monitor in sources:
                self._follow_link(link)
        return woken

    def _follow_link(self, link: Link) -> None:
        """Report a link that broke; offer a lane on one that has come up."""
        if link.note_events():
            self._read_lane(link)
            self._drop_lane(link)
            self._ready.append(Envelope(sender=link.peer_id, message=PeerLost()))
        if link.is_up and link.lane is None and self._options.local_lanes and self._is_near(link.address):
            self._offer_lane(link)

    def _drain_router(self) -> None:
        while True:
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
            elif (message := self._decode(frames[1].buffer)) is not None:
                self._take(self._caller(sender, key, frames[0].bytes), message)

    def _caller(self, peer_id: PeerId, public_key: str, route: bytes) -> Caller:
        """Return who has spoken, noting the link on which to answer."""
        caller = self._callers.get(peer_id)
        if caller is None or (caller.route, caller.public_key) != (route, public_key):
            if caller is not None:
                self._read_lane(caller)
                self._drop_lane(caller)
            caller = self._callers[peer_id] = Caller(peer_id, public_key, self._router, route)
        return caller

    def _drain_link(self, link: Link) -> None:
        while True:
            try:
                frames = link.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 1:
                self._counters.dropped["malformed"] += 1
            elif (message := self._decode(frames[0])) is not None:
                self._take(link, message)

    def _decode(self, frame: bytes | memoryview) -> Message | None:
        try:
            return decode(frame)
        except WrongVersion:
            self._counters.dropped["version"] += 1
        except ProtocolError:
            self._counters.dropped["malformed"] += 1
        return None

    def _take(self, link: Link | Caller, message: Message) -> None:
        """Obey what channels say to each other, keep the rest for `receive`."""
        match message:
            case LaneOffer():
                self._take_up_lane(link, message)
            case LaneMoved(name=name):
                if link.lane is not None and link.lane.offer.name == name:
                    link.lane.peer_has_moved = True
                    self._watch(link.lane)
            case _:
                self._ready.append(Envelope(sender=link.peer_id, message=message))

    # -- lanes

    @property
    def num_lanes(self) -> int:
        """Links on which frames go past ZeroMQ in both directions."""
        return sum(lane.is_open and lane.peer_has_moved for lane in self._lanes())

    def _lanes(self) -> list[Lane]:
        links: list[Link | Caller] = [*self._links.values(), *self._callers.values()]
        return [link.lane for link in links if link.lane is not None]

    def _is_near(self, peer: PeerAddress) -> bool:
        """Whether a peer shares our network: loopback is loopback, and nobody else has our address."""
        return _host(peer.endpoint) == _host(self._address.endpoint)

    def _offer_lane(self, link: Link) -> None:
        try:
            link.lane = lane = Lane.listen(self._options.max_message_bytes)
        except OSError as error:
            logger.warning("no lane to %s: %s", link.peer_id, error)
            return
        self._watch(lane)
        try:
            link.send(encode(lane.offer))
        except zmq.Again:
            self._drop_lane(link)

    def _take_up_lane(self, link: Link | Caller, offer: LaneOffer) -> None:
        self._read_lane(link)
        self._drop_lane(link)
        if self._options.local_lanes:
            lane = Lane.take_up(offer, self._options.max_message_bytes)
            if lane is not None:
                link.lane = lane
                self._move_to_lane(link)

    def _move_to_lane(self, link: Link | Caller) -> None:
        """Send nothing more by ZeroMQ; what is queued there is read before anything on the lane."""
        assert link.lane is not None
        try:
            link.send(encode(LaneMoved(link.lane.offer.name)))
        except zmq.ZMQError:  # full, or gone: not the time to move
            self._drop_lane(link)

    def _send_by_lane(self, link: Link | Caller, frame: bytes) -> bool:
        """Send by the lane, if there is one; return whether the frame needs no other way."""
        lane = link.lane
        if lane is None or not lane.is_open:
            return False
        if not lane.send(frame, self._options.max_queued_messages):
            self._drop_lane(link)
            return False
        if lane.has_backlog:
            self._watch(lane)
        return True

    def _attend_lane(self, link: Link | Caller, sources: set[object]) -> None:
        """Let the peer in, or send and read what can be."""
        lane = link.lane
        if lane is None or lane.fileno() not in sources:
            return
        if not lane.is_open:
            self._poller.unregister(lane.fileno())
            if lane.accept():
                self._move_to_lane(link)
            if link.lane is lane:
                self._watch(lane)
        elif lane.flush() and self._read_lane(link):
            self._watch(lane)
        else:
            self._drop_lane(link)

    def _read_lane(self, link: Link | Caller) -> bool:
        """Take in what has come by the lane; return whether it still stands."""
        lane = link.lane
        if lane is None or not lane.peer_has_moved or not lane.is_open:
            return True
        frames, stands = lane.receive()
        is_foreign = isinstance(link, Caller) and self._admitted.get(link.public_key) != link.peer_id
        for frame in frames:
            if is_foreign:
                self._counters.dropped["foreign"] += 1
            elif (message := self._decode(frame)) is not None:
                self._take(link, message)
        return stands

    def _watch(self, lane: Lane) -> None:
        """Poll for what the lane is ready for."""
        listens = not lane.is_open or lane.peer_has_moved
        flags = (zmq.POLLIN if listens else 0) | (zmq.POLLOUT if lane.has_backlog else 0)
        self._poller.register(lane.fileno(), flags)

    def _drop_lane(self, link: Link | Caller) -> None:
        lane, link.lane = link.lane, None
        if lane is not None:
            self._poller.register(lane.fileno(), 0)
            lane.close()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _host(endpoint: str) -> str:
    """The part of `tcp://HOST:PORT` that names the machine."""
    return endpoint.rpartition(":")[0]
