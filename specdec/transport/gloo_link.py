"""One link between two processes over Gloo: frames in both directions, and the end of the peer noticed.

A frame is sent as a slot (its kind, its length, and as much of it as fits) and, when it is longer, as chunks
behind that. The receiver has always posted a receive for a slot, so that a short frame leaves at once: Gloo
sends nothing before the receive for it is posted. Every posted receive has room for the largest piece that
peers send: Gloo ends the whole process at a piece that is larger than the receive for it (torch 2.13).

What Gloo does when a peer dies: its kernel closes the connection, and all that is pending with it raises.
When the peer's machine is gone or the peer hangs, nothing happens at all. So both sides send a heartbeat when
they have nothing else to say, and each waits for the next frame at most `heartbeat_timeout_s`. An operation
that times out closes the connection, for both ends and for all that is pending; it cannot be taken back by
itself, and `abort` of a Gloo group does nothing. A thread that waits for a frame is therefore ended by its
peer, whom a farewell tells to close, or by the timeout.

Beside a link there may be a device lane (`transport.device_lane`). It begins and ends with the link: a peer
that is gone, silent, or out of step on one is so on the other.
"""

from __future__ import annotations

import enum
import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch

from specdec.core.errors import TransportError
from specdec.transport.base import MAX_MESSAGE_BYTES
from specdec.transport.device_lane import DeviceLane, Shipment, Transfer

_SLOT_BYTES: Final = 16384
"""A round's proposals fit. What does not costs another exchange: its receive is posted behind the slot."""
_CHUNK_BYTES: Final = 1 << 20
_HEADER: Final = struct.Struct("<2sBBQ")
_MAGIC: Final = b"DG"
_VERSION: Final = 1
_ROOM: Final = _SLOT_BYTES - _HEADER.size
"""Bytes of a frame that travel in its slot."""
_SLOT_TAG: Final = 0
_CHUNK_TAG: Final = 1
_REAP_S: Final = 0.25
_REAP_AT: Final = 256
"""Sends in flight at which their buffers are looked after at once."""


class FrameKind(enum.IntEnum):
    """What a frame is."""

    HEARTBEAT = 0
    MESSAGE = 1
    PARCEL = 2
    FAREWELL = 3
    """The sender closes its end; nothing follows."""
    ANNOUNCEMENT = 4
    """A parcel whose tensors come by the device lane of the link; sent where there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDistOptions:
    """Limits and times of a channel."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    max_parcel_bytes: int = 256 << 20
    """Longest message with tensors."""
    max_queued_messages: int = 10_000
    """Per link and direction; beyond it messages are dropped and counted."""
    max_queued_bytes: int = 1 << 30
    """As well: of all messages together, unless it is one alone. A step's states of long prompts are some
    hundred MB."""
    heartbeat_interval_s: float = 1.0
    heartbeat_timeout_s: float = 4.0
    """A link that is silent for so long counts as broken."""
    connect_timeout_s: float = 5.0
    """How long two peers may take to meet, once one has knocked."""
    lane_timeout_s: float = 30.0
    """How long they may then take to open a device lane."""
    unreached_s: float = 30.0
    """A peer to which no link can be opened for so long is reported as lost."""

    def has_room(self, num_queued_bytes: int, num_bytes: int) -> bool:
        """Whether a message may be queued beside what is queued already."""
        return num_queued_bytes == 0 or num_queued_bytes + num_bytes <= self.max_queued_bytes

    def limit_bytes(self, kind: FrameKind) -> int:
        """Return the longest frame of a kind."""
        return self.max_parcel_bytes if kind is FrameKind.PARCEL else self.max_message_bytes


class _InFlight(NamedTuple):
    transfer: Transfer
    piece: torch.Tensor
    by_lane: bool = False


class GlooLink:
    """One end of a link. Any thread may send and close; one thread listens."""

    def __init__(
        self, group: Any, rank: int, options: TorchDistOptions, lane: DeviceLane | None = None
    ) -> None:
        """Take over a group of two, of which this end is `rank`, and the device lane beside it."""
        self._group = group
        self.lane = lane
        """Its device lane, if it has one."""
        self._lane_broke = False
        self._peer = 1 - rank
        self._options = options
        self._patience = timedelta(seconds=options.heartbeat_timeout_s)
        self._state = threading.Condition()
        self._in_flight: deque[_InFlight] = deque()
        self._num_shipped_bytes = 0
        """Of what is in flight, how much goes by the device lane."""
        self._num_sent_bytes = 0
        """And how much does not."""
        self._last_sent_s = time.monotonic()
        self._ended = False
        self._closing = False
        self._slots = [torch.empty(_SLOT_BYTES, dtype=torch.uint8) for _ in range(2)]
        self._keeper = threading.Thread(target=self._keep, name="gloo-link-keeper", daemon=True)
        self._keeper.start()

    def join(self) -> None:
        """After `listen`: wait for what was in flight to be let go."""
        self._keeper.join()

    def send(self, kind: FrameKind, content: memoryview) -> bool:
        """Begin to send a frame, whose memory must not change any more; False when too much is queued.

        Never waits for the peer. What is sent on a link that has ended is lost.
        """
        with self._state:
            if self._ended:
                return True
            if len(self._in_flight) >= self._options.max_queued_messages or not self._options.has_room(
                self._num_sent_bytes, len(content)
            ):
                return False
            self._begin(kind, content)
            if len(self._in_flight) >= _REAP_AT:
                self._state.notify_all()
        return True

    def ship(self, shipment: Shipment) -> bool:
        """Begin to send a parcel by the device lane, as `send` does; False when too much is queued."""
        assert self.lane is not None
        with self._state:
            if self._ended or self._lane_broke:
                return True
            num_bytes = shipment.flat.numel()
            if len(self._in_flight) >= self._options.max_queued_messages or (
                self._num_shipped_bytes > 0
                and self._num_shipped_bytes + num_bytes > self._options.max_parcel_bytes
            ):
                return False
            self._begin(FrameKind.ANNOUNCEMENT, memoryview(bytearray(self.lane.announcement(shipment))))
            try:
                self._in_flight.append(_InFlight(self.lane.send(shipment), shipment.flat, by_lane=True))
                self._num_shipped_bytes += num_bytes
            except RuntimeError:
                self._part()
            self._state.notify_all()
        return True

    def listen(
        self,
        on_frame: Callable[[FrameKind, torch.Tensor], None],
        on_dropped: Callable[[str], None],
    ) -> None:
        """Hand over every frame (uint8 [bytes], the receiver's own); return when the link has ended.

        `on_dropped` is told why a frame was not handed over. A TransportError of `on_frame` ends the link.
        """
        try:
            self._listen(on_frame, on_dropped)
        except (RuntimeError, TransportError):  # a peer that is gone, silent for too long, or out of step
            pass
        finally:
            with self._state:
                self._ended = True
                self._group = None  # its sockets close with the last reference
                self._state.notify_all()
            if self.lane is not None:
                self.lane.abort()
            if self._lane_broke:
                on_dropped("lane_broken")

    def close(self, flush_s: float = 0.0) -> None:
        """Say farewell; wait at most `flush_s` for the peer to have heard it, and all before it."""
        with self._state:
            if self._ended:
                return
            if not self._closing:
                self._closing = True
                self._begin(FrameKind.FAREWELL, memoryview(b""))
            if flush_s > 0.0:
                self._state.wait_for(lambda: self._ended, flush_s)

    def _begin(self, kind: FrameKind, content: memoryview) -> None:
        header = _HEADER.pack(_MAGIC, _VERSION, kind, len(content))
        slot = torch.frombuffer(bytearray(header + bytes(content[:_ROOM])), dtype=torch.uint8)
        pieces = [(slot, _SLOT_TAG)]
        if len(content) > _ROOM:
            rest = torch.frombuffer(content[_ROOM:], dtype=torch.uint8)
            pieces += [(chunk, _CHUNK_TAG) for chunk in _chunks(rest)]
        try:
            for piece, tag in pieces:
                self._in_flight.append(_InFlight(self._group.send([piece], self._peer, tag), piece))
                self._num_sent_bytes += piece.numel()
        except RuntimeError:  # broken: whoever listens notices it as well
            return
        self._last_sent_s = time.monotonic()

    def _part(self) -> None:
        """Lane and link are of no use any more: part from the peer, whether or not it hears that."""
        self._lane_broke = True
        if not self._closing:
            self._closing = True
            self._begin(FrameKind.FAREWELL, memoryview(b""))

    def _listen(
        self,
        on_frame: Callable[[FrameKind, torch.Tensor], None],
        on_dropped: Callable[[str], None],
    ) -> None:
        slot, other = self._slots
        pending = self._post(slot, _SLOT_TAG)
        while True:
            pending.wait(self._patience)
            header = _HEADER.unpack(bytes(slot[: _HEADER.size].numpy()))
            magic, version, number, length = header
            if (magic, version) != (_MAGIC, _VERSION) or number > max(FrameKind):
                on_dropped("malformed" if magic != _MAGIC or version == _VERSION else "version")
                return  # nobody knows what follows
            kind = FrameKind(number)
            if kind is FrameKind.FAREWELL:
                return
            content = self._rest(slot, kind, length)
            slot, other = other, slot
            pending = self._post(slot, _SLOT_TAG)
            if kind is FrameKind.HEARTBEAT:
                continue
            if content is None:
                on_dropped("too_large")
            else:
                on_frame(kind, content)

    def _rest(self, slot: torch.Tensor, kind: FrameKind, length: int) -> torch.Tensor | None:
        """Return a frame of `length` bytes that begins in `slot`; None when it is too large, and let go."""
        if length <= min(_ROOM, self._options.limit_bytes(kind)):
            return slot[_HEADER.size : _HEADER.size + length].clone()
        num_chunks = math.ceil(max(0, length - _ROOM) / _CHUNK_BYTES)
        if length > self._options.limit_bytes(kind):
            scratch = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
            for _ in range(num_chunks):
                self._post(scratch, _CHUNK_TAG).wait(self._patience)
            return None
        content = torch.empty(_ROOM + num_chunks * _CHUNK_BYTES, dtype=torch.uint8)
        content[:_ROOM] = slot[_HEADER.size :]
        for pending in [self._post(chunk, _CHUNK_TAG) for chunk in _chunks(content[_ROOM:])]:
            pending.wait(self._patience)
        return content[:length]

    def _post(self, piece: torch.Tensor, tag: int) -> Any:
        return self._group.recv([piece], self._peer, tag)

    def _keep(self) -> None:
        """Hold what is in flight until it has left; send a heartbeat when nothing else is sent."""
        interval_s = self._options.heartbeat_interval_s
        while True:
            with self._state:
                self._state.wait_for(
                    lambda: self._ended or len(self._in_flight) >= _REAP_AT, min(_REAP_S, interval_s)
                )
                if self._ended:
                    self._in_flight.clear()
                    return
                if time.monotonic() - self._last_sent_s >= interval_s and not self._closing:
                    self._begin(FrameKind.HEARTBEAT, memoryview(b""))
                in_flight = tuple(self._in_flight)
            try:
                for one in in_flight:
                    one.transfer.wait(self._patience)
                    with self._state:
                        if self._in_flight:
                            self._in_flight.popleft()
                        if one.by_lane:
                            self._num_shipped_bytes -= one.piece.numel()
                        else:
                            self._num_sent_bytes -= one.piece.numel()
            except RuntimeError:  # of the link: the wait of whoever listens fails as well
                in_flight = ()
                if one.by_lane and self.lane is not None:
                    self.lane.abort()
                with self._state:
                    if one.by_lane and not self._ended:
                        self._part()
                    self._state.wait_for(lambda: self._ended)
                    self._in_flight.clear()
                return


def _chunks(content: torch.Tensor) -> list[torch.Tensor]:
    return [content[begin : begin + _CHUNK_BYTES] for begin in range(0, content.numel(), _CHUNK_BYTES)]
