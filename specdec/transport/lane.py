"""A shortcut for frames between two processes of one machine: a Unix socket beside their ZeroMQ link.

A frame that goes through ZeroMQ wakes three threads one after the other: the sender's I/O thread, the
receiver's I/O thread, the receiver. That takes a third of a millisecond once a forward has streamed a whole
model through the caches, and a round has four such hops. By a Unix socket one thread wakes.

The ZeroMQ link comes first and stays: it says who the peer is (CURVE), whether it lives, and it carries
whatever the lane does not. The side that opened the link offers a lane through it: the name of a socket on
which it listens, and a secret. The other side connects and shows the secret. Each side then says `LaneMoved`
by ZeroMQ, its last frame there, and sends by the lane from then on; what comes by the lane is not read before
the peer's `LaneMoved`: frames stay in order. A lane that breaks is given up, and frames go by ZeroMQ again.

What travels on a lane is not encrypted: it does not leave the kernel. Both ends belong to one user, who could
look into either process anyway.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections import deque
from typing import Final, Self

from specdec.transport.messages import LaneOffer

_PREFIX: Final = "drafthouse-"
_LENGTH: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("iII")
_SECRET_BYTES: Final = 32
_PROOF_TIMEOUT_S: Final = 0.2
_READ_BYTES: Final = 1 << 16
_MOST_READS: Final = 4
"""At a time: more than a socket's buffer holds, so that only who goes on sending has to be read again."""


class Lane:
    """One end of a lane: first perhaps a socket that listens, then one that is connected."""

    def __init__(
        self, offer: LaneOffer, own_socket: socket.socket, *, is_open: bool, max_frame_bytes: int
    ) -> None:
        """Use `listen` or `take_up`."""
        own_socket.setblocking(False)
        self._offer = offer
        self._socket = own_socket
        self._max_frame_bytes = max_frame_bytes
        self._arrived = bytearray()
        self._backlog: deque[bytes | memoryview] = deque()
        self._num_backlog_bytes = 0
        self.is_open = is_open
        """Whether frames can be sent on it."""
        self.peer_has_moved = False
        """Whether all that the peer sent by ZeroMQ before has arrived; set by the owner."""

    @classmethod
    def listen(cls, max_frame_bytes: int) -> Self:
        """Return the end that listens; the peer must be told its `offer` by the ZeroMQ link.

        Raises:
            OSError: there are no more sockets to be had.
        """
        offer = LaneOffer(_PREFIX + secrets.token_hex(16), secrets.token_bytes(_SECRET_BYTES))
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_abstract(offer.name))
        listener.listen(1)
        return cls(offer, listener, is_open=False, max_frame_bytes=max_frame_bytes)

    @classmethod
    def take_up(cls, offer: LaneOffer, max_frame_bytes: int) -> Self | None:
        """Connect to the peer that made an offer; None when that cannot be, or it is not who it should be."""
        if not offer.name.startswith(_PREFIX):  # nobody shall make us speak to other services
            return None
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:  # there are no more to be had: the ZeroMQ link serves
            return None
        connection.setblocking(False)
        try:
            connection.connect(_abstract(offer.name))
            if not _is_ours(connection):
                raise PermissionError("the lane was offered by another user's process")
            connection.sendall(offer.secret)
        except OSError:  # another network namespace, or gone already: the ZeroMQ link serves
            connection.close()
            return None
        return cls(offer, connection, is_open=True, max_frame_bytes=max_frame_bytes)

    @property
    def offer(self) -> LaneOffer:
        """What names the lane."""
        return self._offer

    @property
    def has_backlog(self) -> bool:
        """Whether frames wait for the kernel to take them."""
        return bool(self._backlog)

    def fileno(self) -> int:
        """What to poll: readable when somebody connects or frames have come, writable for the backlog."""
        return self._socket.fileno()

    def accept(self) -> bool:
        """Let in whoever connects and shows the secret; return whether the lane is open now."""
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return False
        connection.settimeout(_PROOF_TIMEOUT_S)
        try:
            proof = connection.recv(_SECRET_BYTES, socket.MSG_WAITALL) if _is_ours(connection) else b""
        except OSError:
            proof = b""
        if not hmac.compare_digest(proof, self._offer.secret):
            connection.close()
            return False
        connection.setblocking(False)
        self._socket.close()
        self._socket, self.is_open = connection, True
        return True

    def send(self, frame: bytes, max_queued: int, max_queued_bytes: int) -> bool:
        """Send a frame; False when the lane is broken.

        Raises:
            BlockingIOError: `max_queued` frames wait already, or with this one more than `max_queued_bytes`
                would. One may wait however long it is.
        """
        piece = _LENGTH.pack(len(frame)) + frame
        num_waiting = len(self._backlog)
        if num_waiting >= max_queued or (
            num_waiting > 0 and self._num_backlog_bytes + len(piece) > max_queued_bytes
        ):
            raise BlockingIOError
        self._backlog.append(piece)
        self._num_backlog_bytes += len(piece)
        return num_waiting > 0 or self.flush()

    def flush(self) -> bool:
        """Hand the backlog to the kernel, as far as it takes it; False when the lane is broken."""
        try:
            while self._backlog:
                piece = self._backlog[0]
                num_sent = self._socket.send(piece)
                self._num_backlog_bytes -= num_sent
                if num_sent < len(piece):
                    self._backlog[0] = memoryview(piece)[num_sent:]
                else:
                    self._backlog.popleft()
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def receive(self) -> tuple[list[bytes], bool]:
        """Return frames that have arrived, within a bound, and whether the lane still stands."""
        stands = True
        try:
            for _ in range(_MOST_READS):
                data = self._socket.recv(_READ_BYTES)
                self._arrived += data
                stands = len(data) > 0
                if len(data) < _READ_BYTES:
                    break
        except BlockingIOError:
            pass
        except OSError:
            stands = False
        frames: list[bytes] = []
        start = 0
        while len(self._arrived) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._arrived, start)
            if length > self._max_frame_bytes:
                return frames, False
            end = start + _LENGTH.size + length
            if end > len(self._arrived):
                break
            frames.append(bytes(self._arrived[start + _LENGTH.size : end]))
            start = end
        del self._arrived[:start]
        return frames, stands

    def close(self, flush_s: float = 0.0) -> None:
        """Close it, allowing `flush_s` for the backlog."""
        self.is_open = False
        if flush_s > 0.0 and self._backlog:
            self._socket.settimeout(flush_s)
            with contextlib.suppress(OSError):
                self._socket.sendall(b"".join(self._backlog))
        self._backlog.clear()
        self._num_backlog_bytes = 0
        self._socket.close()


def _abstract(name: str) -> bytes:
    """A name without a file: known within the network namespace, free when its socket closes."""
    return b"\0" + name.encode()


def _is_ours(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
