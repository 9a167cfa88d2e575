"""Draft workers in processes of their own, begun in no time.

They are children of a process that has loaded all that they need.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from specdec.core.clock import ManualClock
from specdec.engine.draft_pool.server import DraftServer
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.transport.base import PeerAddress, PeerId
from specdec.transport.zmq import ZmqChannel
from tests.specdec.engine.remote_cluster import ToyDrafter

_ROOT = Path(__file__).parents[3]


class Child(msgspec.Struct, frozen=True):
    """A draft worker's process."""

    pid: int
    address: PeerAddress


class DraftNursery:
    """Begins and kills draft workers that serve one coordinator."""

    def __init__(self, coordinator: PeerAddress) -> None:
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._mother = subprocess.Popen(
            [sys.executable, "-m", "tests.specdec.engine.draft_nursery"],
            cwd=_ROOT,
            env={**os.environ, **one_thread},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.alive: dict[PeerId, Child] = {}
        self._num_begun = 0
        self._tell(msgspec.json.encode(coordinator))

    def begin(self) -> PeerId:
        """Begin one; it listens when this returns."""
        self._num_begun += 1
        name = PeerId(f"draft-{self._num_begun}")
        self._tell(name.encode())
        assert self._mother.stdout is not None
        self.alive[name] = msgspec.json.decode(self._mother.stdout.readline(), type=Child)
        return name

    def kill(self, name: PeerId) -> None:
        """End one without a word."""
        os.kill(self.alive.pop(name).pid, signal.SIGKILL)

    @property
    def addresses(self) -> list[PeerAddress]:
        """Of those that are alive."""
        return [child.address for child in self.alive.values()]

    def close(self) -> None:
        """End all."""
        for name in list(self.alive):
            with suppress(ProcessLookupError):
                self.kill(name)
        self._mother.kill()
        self._mother.communicate()

    def _tell(self, line: bytes) -> None:
        assert self._mother.stdin is not None
        self._mother.stdin.write(line + b"\n")
        self._mother.stdin.flush()


def _main() -> None:
    coordinator = msgspec.json.decode(sys.stdin.buffer.readline(), type=PeerAddress)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while name := sys.stdin.buffer.readline().strip().decode():
        if os.fork() == 0:
            _serve(PeerId(name), coordinator)


def _serve(name: PeerId, coordinator: PeerAddress) -> NoReturn:
    mother = os.getppid()
    channel = ZmqChannel(name)
    channel.admit([coordinator])
    server = DraftServer(channel, ToyDrafter(ManualClock()), shares=DraftShareConfig(max_sequences=3))
    sys.stdout.buffer.write(msgspec.json.encode(Child(os.getpid(), channel.address)) + b"\n")
    sys.stdout.buffer.flush()
    while os.getppid() == mother:
        server.step(0.2)
    os._exit(0)


if __name__ == "__main__":
    _main()
