"""A lane beside a Gloo link: the tensors of a parcel from device memory to device memory, and nothing else.

Everything that is said goes by the link: the head of a parcel (message, names, dtypes, shapes), heartbeats,
farewells. What carries the bytes is a `Pipe`: NCCL (`transport.nccl`), which has neither tags nor lengths nor
an end of its own. So bytes come in the order of their heads, behind them stands a seal (the number of the
parcel on this lane, and its length), and a receive is posted only once a head has come. Whatever does not
agree, or takes longer than a link may be silent, breaks lane and link. Both are opened again under another
name: bytes meant for one lane never arrive on another.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch.distributed import Store

from specdec.core.errors import MessageTooLong, ProtocolError, TransportError
from specdec.transport.lane_choice import LaneEnd
from specdec.transport.messages import Message
from specdec.transport.parcels import ParcelHead, decode_head

logger = logging.getLogger(__name__)

_NUMBER: Final = struct.Struct("<Q")
_SEAL_BYTES: Final = 64
"""Two int64, and what keeps the end aligned."""


class Transfer(Protocol):
    """One transfer that has begun."""

    def wait(self, patience: timedelta) -> Any:
        """Wait for its end; the memory of what was sent may then be used again.

        Raises:
            RuntimeError: it failed, or took longer.
        """
        ...


class Pipe(Protocol):
    """Bytes between the two ends of a link, in order, in both directions at once."""

    @property
    def device(self) -> torch.device:
        """Whose memory it reads and writes."""
        ...

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 [num_bytes] on the device, to receive into."""
        ...

    def send(self, flat: torch.Tensor) -> Transfer:
        """Begin to send, uint8 [bytes] on the device, once what computes it is done; never waits.

        Raises:
            RuntimeError: the pipe is broken.
        """
        ...

    def receive(self, flat: torch.Tensor) -> Transfer:
        """Begin to receive exactly as many bytes as `flat` has, into it.

        Raises:
            RuntimeError: the pipe is broken.
        """
        ...

    def read_seal(self, seal: torch.Tensor) -> tuple[int, int]:
        """Return two int64 of what has arrived (int64 [2] on the device)."""
        ...

    def abort(self) -> None:
        """End it without regard to the peer: what waits in it fails. Idempotent; neither raises nor waits."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceLanes:
    """How a process opens lanes."""

    end: LaneEnd
    """What it says of itself when it meets others."""
    open: Callable[[Store, int, float], Pipe]
    """Given a store of this link's own, the rank of this end (0 or 1) and a bound in seconds, meet the other
    end and return a pipe through which bytes have gone in both directions. RuntimeError: it did not come."""


@dataclass(frozen=True, slots=True)
class Shipment:
    """A parcel for a device lane."""

    head: bytes
    """Of the parcel, encoded."""
    num_bytes: int
    """Of its tensors."""
    flat: torch.Tensor
    """uint8 [bytes] on the device: the tensors, and room for the seal."""


class DeviceLane:
    """One end of a lane. Sends are made in order by whoever holds the link's lock, `take` by who listens."""

    def __init__(
        self, pipe: Pipe, *, max_announcement_bytes: int, max_parcel_bytes: int, patience_s: float
    ) -> None:
        """Take over a pipe.

        Args:
            pipe: it is the lane's alone.
            max_announcement_bytes: longest announcement that the link takes.
            max_parcel_bytes: most bytes of tensors in a parcel, and of those that are sent at a time.
            patience_s: longest (seconds) that bytes may be on their way.
        """
        self._pipe = pipe
        self._max_announcement_bytes = max_announcement_bytes
        self._max_parcel_bytes = max_parcel_bytes
        self._patience = timedelta(seconds=patience_s)
        self._num_sent = 0
        self._num_taken = 0

    def pack(self, message: Message, tensors: Mapping[str, torch.Tensor]) -> Shipment | None:
        """Copy a parcel on the device (any thread), so that the tensors may change at once.

        None: not all of its tensors are there, or there is no room for a copy.

        Raises:
            ProtocolError: it exceeds the size bound.
        """
        if any(tensor.device != self._pipe.device for tensor in tensors.values()):
            return None
        head = ParcelHead.of(message, tensors)
        if head.num_bytes > self._max_parcel_bytes:
            raise ProtocolError(f"tensors of {head.num_bytes} bytes exceed {self._max_parcel_bytes}")
        encoded = head.encode()
        if _NUMBER.size + len(encoded) > self._max_announcement_bytes:
            raise MessageTooLong(len(encoded), self._max_announcement_bytes)
        try:
            flat = torch.empty(head.num_bytes + _SEAL_BYTES, dtype=torch.uint8, device=self._pipe.device)
        except torch.OutOfMemoryError:
            return None
        head.pack(tensors, flat[: head.num_bytes])
        return Shipment(encoded, head.num_bytes, flat)

    def announcement(self, shipment: Shipment) -> bytes:
        """Seal a shipment as the next one; return what has to reach the peer, by the link, for it."""
        number, self._num_sent = self._num_sent, self._num_sent + 1
        seal = _seal_of(shipment.flat)
        seal[0], seal[1] = number, shipment.num_bytes  # filled on the device: nothing waits for it
        return _NUMBER.pack(number) + shipment.head

    def send(self, shipment: Shipment) -> Transfer:
        """Begin to send what has been announced.

        Raises:
            RuntimeError: the lane is broken.
        """
        return self._pipe.send(shipment.flat)

    def take(self, announced: torch.Tensor) -> tuple[ParcelHead, torch.Tensor]:
        """Receive the bytes that an announcement (uint8 [bytes], CPU) is about; takes `patience_s` at most.

        Returns:
            The head, and the bytes of its tensors: uint8 [num_bytes] on the device.

        Raises:
            ProtocolError: announcement or bytes are not what they should be. The lane is of no use any more.
            TransportError: the bytes did not come. The same.
        """
        if announced.numel() < _NUMBER.size:
            raise ProtocolError("an announcement without a number")
        (number,) = _NUMBER.unpack(bytes(announced[: _NUMBER.size].numpy()))
        if number != self._num_taken:
            raise ProtocolError(f"parcel {number} is announced on a device lane instead of {self._num_taken}")
        head, _ = decode_head(announced[_NUMBER.size :])
        if head.num_bytes > self._max_parcel_bytes:
            raise ProtocolError(f"tensors of {head.num_bytes} bytes are announced, more than there may be")
        self._num_taken += 1
        try:
            flat = self._pipe.empty(head.num_bytes + _SEAL_BYTES)
            self._pipe.receive(flat).wait(self._patience)
            seal = self._pipe.read_seal(_seal_of(flat))
        except RuntimeError as error:
            raise TransportError(f"a device lane broke: {error}") from error
        if seal != (number, head.num_bytes):
            raise ProtocolError(f"what came by a device lane is not what was announced: {seal}")
        return head, flat[: head.num_bytes]

    def abort(self) -> None:
        """End it; what waits for its bytes fails. Idempotent (any thread)."""
        self._pipe.abort()


def open_pipe(lanes: DeviceLanes, store: Any, rank: int, timeout_s: float) -> Pipe | None:
    """Return a pipe to the other end, which calls this too; None at both ends when one of them has none.

    Args:
        lanes: how to open it.
        store: of this link's own; it is the two ends' until this returns.
        rank: of this end, 0 or 1.
        timeout_s: bound of the attempt; the other end's word is waited for about as long again.

    Raises:
        RuntimeError: the other end is gone.
    """
    attempt = _Attempt(lanes, store, rank, timeout_s)
    pipe = attempt.result(timeout_s)
    store.set(f"opened-{rank}", b"\0" if pipe is None else b"\1")
    try:
        both = pipe is not None and store.get(f"opened-{1 - rank}") == b"\1"
    except RuntimeError:
        if pipe is not None:
            pipe.abort()
        raise
    if pipe is not None and not both:
        pipe.abort()
    return pipe if both else None


class _Attempt:
    """To open a pipe, in a thread of its own: what a library does inside has no bound that we could set."""

    def __init__(self, lanes: DeviceLanes, store: Store, rank: int, timeout_s: float) -> None:
        self._lanes = lanes
        self._arguments = (store, rank, timeout_s)
        self._lock = threading.Lock()
        self._pipe: Pipe | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="device-lane-opener", daemon=True)
        self._thread.start()

    def result(self, timeout_s: float) -> Pipe | None:
        """Return the pipe; None when it failed, or there is none yet: what comes later is aborted."""
        self._thread.join(timeout_s)
        with self._lock:
            self._given_up = True
            return self._pipe

    def _run(self) -> None:
        try:
            pipe = self._lanes.open(*self._arguments)
        except RuntimeError as error:
            logger.warning("a device lane could not be opened: %s", error)
            return
        with self._lock:
            if not self._given_up:
                self._pipe = pipe
                return
        pipe.abort()


def _seal_of(flat: torch.Tensor) -> torch.Tensor:
    """Return int64 [2], a view of the end of a shipment."""
    begin = flat.numel() - _SEAL_BYTES
    return flat[begin : begin + 16].view(torch.int64)
