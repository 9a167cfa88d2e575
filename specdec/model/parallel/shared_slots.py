"""Memory in which the ranks of one machine hand each other rows, and what stands for it between machines.

The compiled forward writes and reads the slots (`model/csrc/ranks.h`); here they are made. Rank 0 makes a
file without a name in memory, and the others open it through rank 0's entry in /proc: only processes of the
same user can, and its pages go with the last process. Each rank holds the lock of one byte of the file, which
the kernel takes from it when it ends, however it ends: so who waits for a rank finds out that there is none.

Where not all ranks can open the file (they are on several machines, or in containers), the slots are each
rank's own, and the forward calls back to have the others' rows gathered over the group.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import struct
from pathlib import Path
from typing import Any, ClassVar

import torch

from specdec.core.errors import ResourceError, TransportError
from specdec.model.parallel.group import RankGroup

_PROCESSES = Path("/proc")
_CELL_BYTES = 64
_MEETING = struct.Struct("=I")
"""At the beginning of a rank's cell (`dh::RankCell`)."""
_TOKEN_BYTES = 16
"""Random, at the end of the file: the same path on another machine leads to something else."""
_NUM_SETS = 2
_OK, _FAILED = b"1", b"0"
_EXCHANGE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_int64)


class NativeLink(ctypes.Structure):
    """`dh::RankLink`."""

    _fields_: ClassVar[list[tuple[str, Any]]] = [
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("file", ctypes.c_int32),
        ("timeout_ms", ctypes.c_int32),
        ("cells", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("exchange", ctypes.c_void_p),
    ]


class RankSlots:
    """The slots of one compiled forward. All ranks call the same methods in the same order."""

    def __init__(self, group: RankGroup, num_bytes: int = 1 << 16) -> None:
        """Make slots of `num_bytes` each.

        Raises:
            TransportError: a rank is gone.
        """
        self.group = group
        self.native = NativeLink(rank=group.rank, size=group.size, file=-1)
        self.native.timeout_ms = int(1000 * group.timeout_s)
        self._memory: mmap.mmap | torch.Tensor | None = None
        self._lost: TransportError | None = None
        self._exchange = _EXCHANGE(self._fetch)  # must live as long as the link
        self.native.exchange = ctypes.cast(self._exchange, ctypes.c_void_p).value
        self.native.slot_bytes = num_bytes
        if not self._share(num_bytes):
            self._keep_own(num_bytes)

    @property
    def is_shared(self) -> bool:
        """Whether the slots are in memory that all ranks see."""
        return bool(self.native.file >= 0)

    def reserve(self, num_bytes: int) -> None:
        """Make slots of at least `num_bytes` each; what they held is lost.

        Raises:
            ResourceError: there is no more shared memory.
            TransportError: a rank is gone.
        """
        num_bytes = -(-num_bytes // 64) * 64
        if num_bytes <= self.native.slot_bytes:
            return
        was_shared = self.is_shared
        number = self._last_meeting()
        self.close()
        self.native.slot_bytes = num_bytes
        if not was_shared:
            self._keep_own(num_bytes)
        elif not self._share(num_bytes, last_meeting=number):
            raise ResourceError(
                f"there is no memory for the {self._num_bytes(num_bytes)} bytes in which ranks hand each "
                "other rows"
            )

    def raise_lost(self) -> None:
        """Say that a rank is gone, after a forward has found out.

        Raises:
            TransportError: always.
        """
        lost, self._lost = self._lost, None
        raise lost or TransportError(
            f"rank {self.group.rank} of {self.group.size} has lost a peer in the middle of a forward"
        )

    def close(self) -> None:
        """Give the memory back."""
        if self.is_shared:
            os.close(self.native.file)
            self.native.file = -1
        self._memory = None  # unmapped with its last reference
        self.native.cells = self.native.slots = None

    def __del__(self) -> None:
        if getattr(self, "native", None) is not None:
            self.close()

    def _num_bytes(self, slot_bytes: int) -> int:
        return self.group.size * (_CELL_BYTES + _NUM_SETS * slot_bytes)

    def _keep_own(self, slot_bytes: int) -> None:
        memory = torch.zeros(self._num_bytes(slot_bytes), dtype=torch.uint8)
        self._memory = memory
        self.native.slots = -(-memory.data_ptr() // 64) * 64

    def _last_meeting(self) -> int:
        """Return the number of the meeting at which this rank, and so all, has arrived last."""
        if not isinstance(self._memory, mmap.mmap):
            return 0
        return int(_MEETING.unpack_from(self._memory, _CELL_BYTES * self.group.rank)[0])

    def _share(self, slot_bytes: int, last_meeting: int = 0) -> bool:
        """Map memory that all ranks see; False, in all of them, when that cannot be.

        Meetings are counted on: behind half of what numbers can say, 0 would be taken for later ones.
        """
        group = self.group
        size = self._num_bytes(slot_bytes) + _TOKEN_BYTES
        invitation = b""
        if group.rank == 0:
            token = secrets.token_bytes(_TOKEN_BYTES)
            file = self._make(size, token)
            invitation = b"" if file is None else f"{os.getpid()} {file} ".encode() + token
        invitation = group.exchange(invitation)[0]
        is_mapped = invitation != b"" and (group.rank == 0 or self._open(invitation, size))
        if is_mapped and isinstance(self._memory, mmap.mmap):
            _MEETING.pack_into(self._memory, _CELL_BYTES * group.rank, last_meeting)
        answers = group.exchange(_OK if is_mapped else _FAILED)
        if _FAILED in answers:
            self.close()
        return _FAILED not in answers

    def _make(self, size: int, token: bytes) -> int | None:
        """Map a new file of `size` bytes, `token` at its end; return its number, None when that cannot be."""
        try:
            file = os.memfd_create("drafthouse-ranks", os.MFD_CLOEXEC)
        except OSError:
            return None
        try:
            os.posix_fallocate(file, 0, size)  # want of memory shows now and not as a bus error
            os.pwrite(file, token, size - _TOKEN_BYTES)
        except OSError:
            os.close(file)
            return None
        return file if self._map(file, size) else None

    def _open(self, invitation: bytes, size: int) -> bool:
        """Map rank 0's file, if it can be opened here and is the one that it has made."""
        process, number, token = invitation.split(b" ", 2)
        try:
            path = _PROCESSES / process.decode() / "fd" / number.decode()
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        if os.fstat(file).st_size != size or os.pread(file, _TOKEN_BYTES, size - _TOKEN_BYTES) != token:
            os.close(file)
            return False
        return self._map(file, size)

    def _map(self, file: int, size: int) -> bool:
        """Map an open file and hold this rank's lock on it; the file is closed when that cannot be."""
        if not _hold(file, self.group.rank):
            os.close(file)
            return False
        try:
            memory = mmap.mmap(file, size)
        except OSError:
            os.close(file)
            return False
        self.native.file = file
        self._memory = memory
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.native.cells, self.native.slots = address, address + _CELL_BYTES * self.group.size
        return True

    def _fetch(self, which: int, num_bytes: int) -> int:
        """Fill all slots of a set from this rank's; called from within a forward, without shared memory."""
        try:
            slots = [self._slot(which, rank, num_bytes) for rank in range(self.group.size)]
            everyone = self.group.gather(slots[self.group.rank])
            for slot, rows in zip(slots, everyone, strict=True):
                slot.copy_(rows)
        except TransportError as error:
            self._lost = error
            return 1
        return 0

    def _slot(self, which: int, rank: int, num_bytes: int) -> torch.Tensor:
        assert isinstance(self._memory, torch.Tensor)
        start = self.native.slots - self._memory.data_ptr()
        start += (which * self.group.size + rank) * self.native.slot_bytes
        return self._memory[start : start + num_bytes]


def _hold(file: int, rank: int) -> bool:
    """Lock byte `rank` of an open file, until the file is closed or the process ends."""
    lock = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)  # struct flock
    try:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, lock)
    except OSError:
        return False
    return True
