"""Channels over `torch.distributed`: messages by Gloo, and tensors beside them by Gloo or from GPU to GPU.

Purpose: what is a tensor on the wire between groups, such as hidden states for remote drafters. Messages
without tensors travel as well, so that this is a channel like the others; ZeroMQ is faster for them, and safe
on a network that others share (see `transport.gloo_door` for who can do what here).

Nothing is pickled: frames are those of `messages` and `parcels`, in uint8 tensors, from point to point.
Tensors on accelerators are copied to the host, and arrive there; but where both ends have a device lane
(`transport.device_lane`), those of its device arrive on the other end's. What is sent before a link is up
goes by the host in any case: nothing waits in the memory of a GPU.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import torch

from specdec.core.errors import ChannelClosed, ChannelTimeout, MessageTooLong, ProtocolError, TransportError
from specdec.transport.base import ChannelCounters, Envelope, PeerAddress, PeerId, PeerLost
from specdec.transport.device_lane import DeviceLane, DeviceLanes
from specdec.transport.gloo_door import (
    GUEST_RANK,
    HOST_RANK,
    Door,
    Knock,
    Meeting,
    MeetingTerms,
    endpoint_of,
    knock_at,
)
from specdec.transport.gloo_link import FrameKind, GlooLink, TorchDistOptions
from specdec.transport.messages import Message, WrongVersion, decode, encode
from specdec.transport.parcels import decode_parcel, encode_parcel

logger = logging.getLogger(__name__)

_FIRST_RETRY_S: Final = 0.05
_MAX_RETRY_S: Final = 1.0


class TorchDistChannel:
    """A `TensorChannel` over Gloo. Its threads take in what arrives, whatever its owner does."""

    def __init__(
        self,
        peer_id: PeerId,
        *,
        host: str = "127.0.0.1",
        options: TorchDistOptions | None = None,
        lanes: DeviceLanes | None = None,
    ) -> None:
        """Listen on `host` alone.

        Args:
            peer_id: its name.
            host: an address of this machine.
            options: limits and times.
            lanes: how device lanes are opened, to peers that have such too; None: there are none.

        Raises:
            ResourceError: the address cannot be bound.
        """
        self._options = options or TorchDistOptions()
        self._terms = MeetingTerms(
            timeout_s=self._options.connect_timeout_s,
            lane_timeout_s=self._options.lane_timeout_s,
            lanes=lanes,
        )
        self._counters = ChannelCounters()
        self._changed = threading.Condition()
        self._inbox: deque[Envelope] = deque()
        self._num_waiting: Counter[PeerId] = Counter()
        """Of the arrivals in the inbox, how many are whose."""
        self._bytes_waiting: Counter[PeerId] = Counter()
        """And how long they are."""
        self._woken = False
        self._closed = False
        self._admitted: dict[PeerId, str] = {}
        self._links: dict[PeerId, _Dialled] = {}
        self._callers: dict[PeerId, GlooLink] = {}
        self._threads: list[threading.Thread] = []
        self._door = Door(
            host,
            is_member=lambda name, key: self._admitted.get(name) == key,
            let_in=self._let_in,
            on_guest=self._note_thread,
            on_dropped=self._drop,
            terms=self._terms,
        )
        self._address = PeerAddress(
            peer_id=peer_id, endpoint=endpoint_of(host, self._door.port), public_key=self._door.key
        )
        _channels.add(self)

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
        with self._changed:
            self._require_open()
            known = self._links.get(peer.peer_id)
            if known is not None and known.address == peer:
                return
            self._links[peer.peer_id] = dialled = _Dialled(self, peer)
        if known is not None:
            known.close()
        thread = threading.Thread(target=dialled.run, name=f"torch-dist-{peer.peer_id}", daemon=True)
        thread.start()
        self._note_thread(thread)

    def disconnect(self, peer_id: PeerId) -> None:
        """Close a link; see `Channel.disconnect`."""
        with self._changed:
            link = self._links.pop(peer_id, None)
        if link is not None:
            link.close()

    def admit(self, peers: Iterable[PeerAddress]) -> None:
        """Replace the set of peers that may open links (any thread)."""
        self._admitted = {peer.peer_id: peer.public_key for peer in peers}

    def send(self, peer_id: PeerId, message: Message) -> None:
        """Queue a message; see `Channel.send`."""
        self._send(peer_id, FrameKind.MESSAGE, memoryview(bytearray(encode(message))))

    def send_tensors(self, peer_id: PeerId, message: Message, tensors: Mapping[str, torch.Tensor]) -> None:
        """Queue a message with tensors; see `TensorChannel.send_tensors`."""
        self._require_open()
        link = self._lane_link(peer_id)
        if link is not None and link.lane is not None:
            shipment = link.lane.pack(message, tensors)
            if shipment is not None:
                self._count_sent(link.ship(shipment))
                return
        self._send(peer_id, FrameKind.PARCEL, encode_parcel(message, tensors).numpy().data)

    def receive(self, timeout_s: float | None) -> Envelope:
        """Return the next arrival; see `Channel.receive`."""
        with self._changed:
            self._require_open()
            if not self._inbox:
                self._changed.wait_for(lambda: self._inbox or self._woken or self._closed, timeout_s)
                self._require_open()
            if self._inbox:
                self._counters.received += 1
                envelope = self._inbox.popleft()
                self._num_waiting[envelope.sender] -= 1
                self._bytes_waiting[envelope.sender] -= envelope.num_bytes
                return envelope
            self._woken = False
            raise ChannelTimeout(f"nothing arrived at {self._address.peer_id} within {timeout_s} s")

    def wake(self) -> None:
        """Make a waiting `receive` return early (any thread)."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self, flush_s: float = 0.0) -> None:
        """Close all links; see `Channel.close`."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            links: list[_Dialled | GlooLink] = [*self._links.values(), *self._callers.values()]
            self._links.clear()
            self._callers.clear()
        until_s = time.monotonic() + flush_s
        for link in links:
            link.close(max(0.0, until_s - time.monotonic()))
        self._door.close()

    def join(self) -> None:
        """After `close`: wait for its threads, each at most as long as it can take to hear of the end.

        That is to find the peer's store, to have an answer, to meet; and to open a lane, or to hear nothing.
        """
        options = self._options
        patience_s = 3 * options.connect_timeout_s + options.heartbeat_timeout_s
        if self._terms.lanes is not None:
            patience_s += 2 * options.lane_timeout_s
        until_s = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))

    def _send(self, peer_id: PeerId, kind: FrameKind, content: memoryview) -> None:
        limit = self._options.limit_bytes(kind)
        if len(content) > limit:
            raise MessageTooLong(len(content), limit)
        self._require_open()
        link = self._links.get(peer_id) or self._callers.get(peer_id)
        if link is None:
            self._drop("unknown_peer")
        else:
            self._count_sent(link.send(kind, content))

    def _count_sent(self, is_sent: bool) -> None:
        if is_sent:
            self._counters.sent += 1
        else:
            self._drop("full")

    def _lane_link(self, peer_id: PeerId) -> GlooLink | None:
        """Return the link to a peer if it is up: then nothing that was sent before is still to be sent."""
        dialled = self._links.get(peer_id)
        return self._callers.get(peer_id) if dialled is None else dialled.link

    def _require_open(self) -> None:
        if self._closed:
            raise ChannelClosed(f"channel {self._address.peer_id} is closed")

    def _note_thread(self, thread: threading.Thread) -> None:
        with self._changed:
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)

    def _drop(self, reason: str) -> None:
        with self._changed:
            self._counters.dropped[reason] += 1

    def _let_in(self, knock: Knock, meeting: Meeting) -> None:
        """Answer to a member on the link that it has opened; take in what it brings."""
        link = self._link(meeting, HOST_RANK)
        with self._changed:
            if not self._closed:
                self._callers[knock.peer_id] = link
        if self._closed:
            link.close()
        self._hear(link, knock.peer_id, knock.public_key)
        with self._changed:
            if self._callers.get(knock.peer_id) is link:
                del self._callers[knock.peer_id]
        link.join()

    def _dial(self, peer: PeerAddress, given_up: Callable[[], bool]) -> GlooLink | None:
        """Return a link to a peer; None when it cannot be reached, or refuses."""
        meeting = knock_at(peer, self._address, terms=self._terms, given_up=given_up)
        return None if meeting is None else self._link(meeting, GUEST_RANK)

    def _link(self, meeting: Meeting, rank: int) -> GlooLink:
        lane = None
        if meeting.pipe is not None:
            lane = DeviceLane(
                meeting.pipe,
                max_announcement_bytes=self._options.limit_bytes(FrameKind.ANNOUNCEMENT),
                max_parcel_bytes=self._options.max_parcel_bytes,
                patience_s=self._options.heartbeat_timeout_s,
            )
        return GlooLink(meeting.group, rank, self._options, lane)

    def _hear(self, link: GlooLink, sender: PeerId, public_key: str) -> None:
        """Take in what a link brings, until it ends; as a caller, only while it is admitted."""

        def take(kind: FrameKind, content: torch.Tensor) -> None:
            dialled = self._links.get(sender)
            is_ours = dialled is not None and dialled.link is link
            if not is_ours and self._admitted.get(sender) != public_key:
                self._drop("foreign")
                if kind is FrameKind.ANNOUNCEMENT:
                    raise ProtocolError(
                        "the bytes of a parcel that nobody takes are in the way of all others"
                    )
            elif kind is FrameKind.ANNOUNCEMENT:
                self._take_shipment(link, sender, content)
            elif kind is FrameKind.PARCEL:
                self._deliver_opened(sender, lambda: decode_parcel(content), content.numel())
            else:
                self._deliver_opened(sender, lambda: (decode(content.numpy().data), None), content.numel())

        link.listen(take, self._drop)

    def _take_shipment(self, link: GlooLink, sender: PeerId, announced: torch.Tensor) -> None:
        """Deliver a parcel whose tensors come by the device lane.

        Raises:
            TransportError: the lane is of no use any more.
        """
        # Errors are logged as text: whoever kept one would keep the link's sockets open, by its frames.
        try:
            if link.lane is None:
                raise ProtocolError("a parcel is announced, and the link has no device lane")
            head, flat = link.lane.take(announced)
        except WrongVersion:
            self._drop("version")
            raise
        except ProtocolError as error:
            logger.warning("the link to %s is given up: %s", sender, str(error))
            self._drop("malformed")
            raise
        except TransportError as error:
            logger.warning("the link to %s is given up: %s", sender, str(error))
            self._drop("lane_broken")
            raise
        self._deliver_opened(sender, lambda: head.unpack(flat), announced.numel() + flat.nbytes)

    def _deliver_opened(
        self,
        sender: PeerId,
        unpack: Callable[[], tuple[Message, Mapping[str, torch.Tensor] | None]],
        num_bytes: int,
    ) -> None:
        """Deliver what can be understood; count the rest."""
        try:
            message, tensors = unpack()
        except WrongVersion:
            self._drop("version")
        except ProtocolError:
            self._drop("malformed")
        else:
            self._deliver(Envelope(sender=sender, message=message, tensors=tensors, num_bytes=num_bytes))

    def _deliver(self, envelope: Envelope) -> None:
        with self._changed:
            if self._closed:
                return
            if not self._inbox:
                self._num_waiting.clear()
                self._bytes_waiting.clear()
            sender, options = envelope.sender, self._options
            if self._num_waiting[sender] >= options.max_queued_messages or not options.has_room(
                self._bytes_waiting[sender], envelope.num_bytes
            ):
                self._counters.dropped["full"] += 1
                return
            self._num_waiting[sender] += 1
            self._bytes_waiting[sender] += envelope.num_bytes
            self._inbox.append(envelope)
            self._changed.notify_all()


class _Dialled:
    """A link that this end opens, and opens again when it breaks, until it is closed."""

    def __init__(self, channel: TorchDistChannel, address: PeerAddress) -> None:
        self.address = address
        self.link: GlooLink | None = None
        self._channel = channel
        self._changed = threading.Condition()
        self._unsent: deque[tuple[FrameKind, memoryview]] = deque()
        self._num_unsent_bytes = 0
        self._closed = False

    def run(self) -> None:
        """Dial, listen, report the end, and begin again.

        Who is not to be reached is reported again and again, too: it may have been dead before it was called,
        and its owner is to have the chance of not waiting for it.
        """
        retry_s = _FIRST_RETRY_S
        unreached_since_s = time.monotonic()
        while not self._closed:
            link = self._channel._dial(self.address, lambda: self._closed)
            if link is not None:
                retry_s = _FIRST_RETRY_S
                self._use(link)
                unreached_since_s = time.monotonic()
            elif time.monotonic() - unreached_since_s >= self._channel._options.unreached_s:
                unreached_since_s = time.monotonic()
                self._report_lost()
            with self._changed:
                self._changed.wait_for(lambda: self._closed, retry_s)
            retry_s = min(2 * retry_s, _MAX_RETRY_S)

    def _use(self, link: GlooLink) -> None:
        with self._changed:
            while self._unsent and not self._closed:
                kind, content = self._unsent.popleft()
                self._num_unsent_bytes -= len(content)
                link.send(kind, content)
            self.link = link
            self._changed.notify_all()
            if self._closed:
                link.close()
        self._channel._hear(link, self.address.peer_id, self.address.public_key)
        with self._changed:
            self.link = None
        self._report_lost()
        link.join()

    def _report_lost(self) -> None:
        if not self._closed:
            self._channel._deliver(Envelope(sender=self.address.peer_id, message=PeerLost()))

    def send(self, kind: FrameKind, content: memoryview) -> bool:
        """Send now, or once the link is up; False when too much is queued."""
        with self._changed:
            if self.link is not None:
                return self.link.send(kind, content)
            options = self._channel._options
            if len(self._unsent) >= options.max_queued_messages or not options.has_room(
                self._num_unsent_bytes, len(content)
            ):
                return False
            self._unsent.append((kind, content))
            self._num_unsent_bytes += len(content)
            return True

    def close(self, flush_s: float = 0.0) -> None:
        """End it, allowing `flush_s` for what is queued."""
        with self._changed:
            if flush_s > 0.0 and self._unsent:
                self._changed.wait_for(lambda: not self._unsent, flush_s)
            self._closed = True
            self._changed.notify_all()
            link = self.link
        if link is not None:
            link.close(flush_s)


_channels: weakref.WeakSet[TorchDistChannel] = weakref.WeakSet()
"""Closed ones too: their threads hold them until they end."""


@atexit.register
def _end_all() -> None:
    """A thread that is inside torch when the interpreter ends would turn that end into an abort."""
    channels = list(_channels)
    for channel in channels:
        channel.close()
    for channel in channels:
        channel.join()
