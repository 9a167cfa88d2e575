"""Channels inside one process, over a network that can delay, lose, double, reorder and kill.

Two ways of telling time. With a `ManualClock` the network is a discrete-event simulation in one thread: a
`receive` that waits moves the clock to the next arrival and runs the services it wakes, so that thousands of
adverse schedules run in seconds and each can be repeated from its seed. With any other clock, channels may be
used from several threads in real time.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from specdec.core.clock import Clock, ManualClock, MonotonicClock
from specdec.core.errors import ChannelClosed, ChannelTimeout, MessageTooLong, ProtocolError
from specdec.transport.base import (
    MAX_MESSAGE_BYTES,
    MAX_QUEUED_BYTES,
    ChannelCounters,
    Envelope,
    LinkNews,
    PeerAddress,
    PeerFound,
    PeerId,
    PeerLost,
)
from specdec.transport.inbox import Inbox
from specdec.transport.messages import Message, WrongVersion, decode, encode, is_frame

if TYPE_CHECKING:  # whoever sends no tensors need not load torch
    import torch


_MAX_QUEUED_MESSAGES: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What a network does to messages; each is drawn independently from the network's seed."""

    delay_s: tuple[float, float] = (0.0, 0.0)
    """Bounds of a uniform delay."""
    loss: float = 0.0
    """Probability that a message never arrives."""
    duplication: float = 0.0
    """Probability that it arrives twice."""
    in_order: bool = True
    """Whether messages of one link overtake each other never (as over TCP), or as their delays have it."""


@dataclass(order=True, slots=True)
class _Event:
    due_s: float
    order: int
    run: Callable[[], None] = field(compare=False)


class MemoryNetwork:
    """The medium between the channels opened on it."""

    def __init__(self, *, faults: Faults | None = None, seed: int = 0, clock: Clock | None = None) -> None:
        self.faults = faults or Faults()
        """May be replaced at any time."""
        self.clock = clock or MonotonicClock()
        self._random = random.Random(seed)
        self._changed = threading.Condition(threading.RLock())
        self._events: list[_Event] = []
        self._order = itertools.count()
        self._channels: dict[PeerId, MemoryChannel] = {}
        self._services: dict[PeerId, Callable[[], object]] = {}
        self._in_service: set[PeerId] = set()
        self._link_free_s: dict[tuple[PeerId, PeerId], float] = {}
        self._num_breaks: Counter[frozenset[PeerId]] = Counter()
        """Of links that are broken, by their ends: how many breaks are not over."""

    def open(self, peer_id: PeerId, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> MemoryChannel:
        """Return a new channel. A channel that had this id before is dead from now on."""
        with self._changed:
            self.kill(peer_id)
            key = f"{peer_id}-key-{next(self._order)}"
            address = PeerAddress(peer_id=peer_id, endpoint=f"memory://{peer_id}", public_key=key)
            channel = MemoryChannel(self, address, max_message_bytes)
            self._channels[peer_id] = channel
            return channel

    def serve(self, peer_id: PeerId, service: Callable[[], object]) -> None:
        """Simulation only: call `service` whenever something has arrived at `peer_id`."""
        self._services[peer_id] = service

    def schedule(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` (such as a death) after `delay_s`."""
        with self._changed:
            self._push(self.clock.now_s() + delay_s, action)

    def kill(self, peer_id: PeerId) -> None:
        """End a channel without a word, as a crash does. Unknown peers are ignored."""
        with self._changed:
            channel = self._channels.pop(peer_id, None)
            self._services.pop(peer_id, None)
            if channel is None:
                return
            channel._closed = True
            for other in self._channels.values():
                if other._links.get(peer_id) == channel.address:
                    due_s = self.clock.now_s() + self._random.uniform(*self.faults.delay_s)
                    self._push(due_s, partial(other._inbox.put, peer_id, PeerLost(), 0))
            self._changed.notify_all()

    def break_link(self, one: PeerId, other: PeerId, for_s: float) -> None:
        """Lose for so long whatever arrives from one of two peers at the other.

        Who has opened a link to the other is told that it broke, and that it stands again.
        """
        with self._changed:
            if not self._is_broken(one, other):
                self._report(one, other, PeerLost())
            self._num_breaks[frozenset((one, other))] += 1
            self._push(self.clock.now_s() + for_s, partial(self._mend_link, one, other))

    def _mend_link(self, one: PeerId, other: PeerId) -> None:
        ends = frozenset((one, other))
        self._num_breaks[ends] -= 1
        if not self._num_breaks[ends]:
            del self._num_breaks[ends]
            self._report(one, other, PeerFound())

    def _is_broken(self, one: PeerId, other: PeerId) -> bool:
        return bool(self._num_breaks) and self._num_breaks[frozenset((one, other))] > 0

    def _report(self, one: PeerId, other: PeerId, news: LinkNews) -> None:
        """Tell whichever of two peers has opened a link to the other, if both are there."""
        ends = self._channels.get(one), self._channels.get(other)
        for channel, opposite in (ends, ends[::-1]):
            if channel is None or opposite is None:
                continue
            if channel._links.get(opposite.address.peer_id) == opposite.address:
                channel._inbox.put(opposite.address.peer_id, news, 0)

    def run_for(self, duration_s: float) -> None:
        """Simulation only: let time pass and deliver what falls due."""
        self._simulate(self.clock.now_s() + duration_s, lambda: False)

    def _push(self, due_s: float, run: Callable[[], None]) -> None:
        heapq.heappush(self._events, _Event(due_s, next(self._order), run))
        self._changed.notify_all()

    def _transmit(self, sender: PeerAddress, receiver: PeerId, frame: bytes) -> None:
        with self._changed:
            copies = (self._random.random() >= self.faults.loss) + (
                self._random.random() < self.faults.duplication
            )
            for _ in range(copies):
                due_s = self.clock.now_s() + self._random.uniform(*self.faults.delay_s)
                link = (sender.peer_id, receiver)
                if self.faults.in_order:
                    due_s = self._link_free_s[link] = max(due_s, self._link_free_s.get(link, 0.0))
                self._push(due_s, partial(self._arrive, sender, receiver, frame))

    def _arrive(self, sender: PeerAddress, receiver: PeerId, frame: bytes) -> None:
        channel = self._channels.get(receiver)
        if channel is None or self._is_broken(sender.peer_id, receiver):
            return
        channel._accept(sender, frame)
        service = self._services.get(receiver)
        if service is not None and receiver not in self._in_service:
            self._in_service.add(receiver)
            try:
                service()
            finally:
                self._in_service.discard(receiver)

    def _wait(self, channel: MemoryChannel, timeout_s: float | None) -> None:
        """Return when `channel` has something, was woken or closed, or the time is over."""

        def ready() -> bool:
            return bool(channel._inbox) or channel._woken or channel._closed

        if isinstance(self.clock, ManualClock):
            assert timeout_s is not None or self._events, "deadlock: nothing can ever arrive"
            self._simulate(self.clock.now_s() + (timeout_s if timeout_s is not None else 1e9), ready)
        else:
            self._wait_in_real_time(timeout_s, ready)

    def _simulate(self, until_s: float, ready: Callable[[], bool]) -> None:
        clock = self.clock
        assert isinstance(clock, ManualClock), "simulation needs a ManualClock"
        while not ready():
            if not self._events or self._events[0].due_s > until_s:
                clock.advance(max(0.0, until_s - clock.now_s()))
                return
            event = heapq.heappop(self._events)
            clock.advance(max(0.0, event.due_s - clock.now_s()))
            event.run()

    def _wait_in_real_time(self, timeout_s: float | None, ready: Callable[[], bool]) -> None:
        until_s = None if timeout_s is None else self.clock.now_s() + timeout_s
        with self._changed:
            while True:
                now_s = self.clock.now_s()
                while self._events and self._events[0].due_s <= now_s:
                    heapq.heappop(self._events).run()
                if ready() or (until_s is not None and now_s >= until_s):
                    return
                horizons = [self._events[0].due_s] if self._events else []
                horizons += [] if until_s is None else [until_s]
                self._changed.wait(min(horizons) - now_s if horizons else None)


class MemoryChannel:
    """One end on a `MemoryNetwork`. Messages pass through the real codec."""

    def __init__(self, network: MemoryNetwork, address: PeerAddress, max_message_bytes: int) -> None:
        self._network = network
        self._address = address
        self._max_message_bytes = max_message_bytes
        self._counters = ChannelCounters()
        self._inbox: Inbox[bytes | LinkNews] = Inbox(
            max_items=_MAX_QUEUED_MESSAGES, max_bytes=MAX_QUEUED_BYTES
        )
        self._links: dict[PeerId, PeerAddress] = {}
        self._callers: set[PeerId] = set()
        self._admitted: dict[PeerId, str] = {}
        self._woken = False
        self._closed = False

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
        self._links[peer.peer_id] = peer

    def disconnect(self, peer_id: PeerId) -> None:
        """Close a link; see `Channel.disconnect`."""
        self._links.pop(peer_id, None)

    def admit(self, peers: Iterable[PeerAddress]) -> None:
        """Replace the set of peers that may open links."""
        self._admitted = {peer.peer_id: peer.public_key for peer in peers}

    def send(self, peer_id: PeerId, message: Message) -> None:
        """Queue a message; see `Channel.send`."""
        self._send(peer_id, encode(message))

    def send_tensors(self, peer_id: PeerId, message: Message, tensors: Mapping[str, torch.Tensor]) -> None:
        """Queue a message with tensors; see `TensorChannel.send_tensors`."""
        from specdec.transport.parcels import encode_parcel

        self._send(peer_id, encode_parcel(message, tensors).numpy().tobytes())

    def _send(self, peer_id: PeerId, frame: bytes) -> None:
        self._require_open()
        if len(frame) > self._max_message_bytes:
            raise MessageTooLong(len(frame), self._max_message_bytes)
        if peer_id not in self._links and peer_id not in self._callers:
            self._counters.dropped["unknown_peer"] += 1
            return
        self._counters.sent += 1
        self._network._transmit(self._address, peer_id, frame)

    def inject(self, peer_id: PeerId, frame: bytes) -> None:
        """Send raw bytes, as a faulty or hostile peer would."""
        self._network._transmit(self._address, peer_id, frame)

    def receive(self, timeout_s: float | None) -> Envelope:
        """Return the next arrival; see `Channel.receive`. Peers take turns, by bytes (`Inbox`)."""
        clock = self._network.clock
        until_s = None if timeout_s is None else clock.now_s() + timeout_s
        with self._network._changed:
            while True:
                if not self._inbox:
                    self._network._wait(self, None if until_s is None else max(0.0, until_s - clock.now_s()))
                self._require_open()
                if not self._inbox:
                    self._woken = False
                    raise ChannelTimeout(f"nothing arrived at {self._address.peer_id} within {timeout_s} s")
                envelope = self._opened(*self._inbox.take())
                if envelope is not None:
                    self._counters.received += 1
                    return envelope

    def wake(self) -> None:
        """Make a waiting `receive` return early."""
        with self._network._changed:
            self._woken = True
            self._network._changed.notify_all()

    def close(self, flush_s: float = 0.0) -> None:
        """Leave the network; what was sent still arrives."""
        with self._network._changed:
            if self._network._channels.get(self._address.peer_id) is self:
                self._network.kill(self._address.peer_id)
            self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"channel {self._address.peer_id} is closed")

    def _accept(self, sender: PeerAddress, frame: bytes) -> None:
        link = self._links.get(sender.peer_id)
        if link is None or link.public_key != sender.public_key:
            if self._admitted.get(sender.peer_id) != sender.public_key:
                self._counters.dropped["foreign"] += 1
                return
            self._callers.add(sender.peer_id)
        if len(frame) > self._max_message_bytes:
            self._counters.dropped["too_large"] += 1
        elif self._inbox.has_room(sender.peer_id, len(frame)):
            self._inbox.put(sender.peer_id, frame, len(frame))
        else:
            self._counters.dropped["full"] += 1

    def _opened(self, sender: PeerId, arrived: bytes | LinkNews, num_bytes: int) -> Envelope | None:
        if not isinstance(arrived, bytes):
            return Envelope(sender=sender, message=arrived)
        try:
            return _opened(sender, arrived, num_bytes)
        except WrongVersion:
            self._counters.dropped["version"] += 1
        except ProtocolError:
            self._counters.dropped["malformed"] += 1
        return None


def _opened(sender: PeerId, frame: bytes, num_bytes: int) -> Envelope:
    if is_frame(frame):
        return Envelope(sender=sender, message=decode(frame), num_bytes=num_bytes)
    if not frame:
        raise ProtocolError("an empty frame")
    import torch

    from specdec.transport.parcels import decode_parcel

    message, tensors = decode_parcel(torch.frombuffer(bytearray(frame), dtype=torch.uint8))
    return Envelope(sender=sender, message=message, tensors=tensors, num_bytes=num_bytes)
