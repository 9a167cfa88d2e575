"""Memory in which the ranks of one machine hand each other rows, and what stands for it between machines.

The compiled forward writes and reads the slots (`model/csrc/ranks.h`); here they are made. Rank 0 makes a
file in shared memory, the others open it by the name that rank 0 tells them, and nobody can any more once
all have: its pages go with the last process. Each rank holds the lock of one byte of the file, which the
kernel takes from it when it ends, however it ends: so who waits for a rank finds out that there is none.

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
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch

from specdec.core.errors import ResourceError, TransportError
from specdec.model.parallel.group import RankGroup

_FOLDER = Path("/dev/shm")
_CELL_BYTES = 64
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
        self.close()
        self.native.slot_bytes = num_bytes
        if not was_shared:
            self._keep_own(num_bytes)
        elif not self._share(num_bytes):
            raise ResourceError(
                f"{_FOLDER} has no room for the {self._num_bytes(num_bytes)} bytes in which ranks hand each "
                "other rows: make it larger, or set compile.mode = off"
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

    def _share(self, slot_bytes: int) -> bool:
        """Map memory that all ranks see; False, in all of them, when that cannot be."""
        group = self.group
        size = self._num_bytes(slot_bytes)
        name = ""
        if group.rank == 0:
            name = f"drafthouse-{os.getpid()}-{secrets.token_hex(16)}"
            name = name if self._map(name, size, os.O_CREAT | os.O_EXCL) else ""
        name = group.exchange(name.encode())[0].decode()
        is_mapped = name != "" and (group.rank == 0 or self._map(name, size, 0))
        answers = group.exchange(_OK if is_mapped else _FAILED)
        if group.rank == 0 and name:
            with suppress(OSError):
                (_FOLDER / name).unlink()
        if _FAILED in answers:
            self.close()
        return _FAILED not in answers

    def _map(self, name: str, size: int, flags: int) -> bool:
        """Open (with `flags`, make) the file of that name, map it, and hold this rank's lock on it."""
        try:
            file = os.open(_FOLDER / name, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        except OSError:
            return False
        try:
            if flags:
                os.posix_fallocate(file, 0, size)  # a full file system shows now and not as a bus error
            memory = mmap.mmap(file, size)
        except OSError:
            os.close(file)
            return False
        self.native.file = file
        self._memory = memory
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.native.cells, self.native.slots = address, address + _CELL_BYTES * self.group.size
        return _hold(file, self.group.rank)

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
