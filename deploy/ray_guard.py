"""Notices that the local cluster's own processes have died, when nobody else can.

Once its raylet is gone a process waits inside Ray for answers that do not come, and does not hear signals;
and while nobody reaps the dead raylet, its workers take it for alive and stay.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

import psutil

logger = logging.getLogger(__name__)

_HEADS: Final = ("raylet", "gcs_server")
_LOOK_S = 0.5
_LOOKS_PER_CENSUS = 10
"""A census walks over every process of the machine."""


class RayGuard:
    """A thread that watches the raylet and the GCS which this process has started."""

    def __init__(
        self, on_loss: Callable[[str, Sequence[psutil.Process]], None], *, look_s: float = _LOOK_S
    ) -> None:
        """`on_loss` is called in the guard's thread, once: what died, who was there at the last census."""
        self._on_loss = on_loss
        self._look_s = look_s
        self._heads: list[tuple[str, psutil.Process]] = []
        self._family: list[psutil.Process] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray-guard", daemon=True)

    def start(self) -> None:
        """Watch the children that there are now."""
        named = ((_name(child), child) for child in psutil.Process().children())
        self._heads = [(name, child) for name, child in named if name in _HEADS]
        self._thread.start()

    def stop(self) -> None:
        """Watch no more: what dies from now on is meant to. Idempotent; before `start` too."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(self._look_s):
            for name, head in self._heads:
                if not is_alive(head):
                    self._on_loss(f"{name} (process {head.pid})", self._family)
                    return
            if number % _LOOKS_PER_CENSUS == 0:
                self._family = psutil.Process().children(recursive=True)
            number += 1


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended and is not reaped does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""
