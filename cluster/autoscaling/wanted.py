"""How many target groups and draft workers there should be, on its way from the policies to the doors, who
export it: over the directory.

Serve runs the policies in its controller, and says nowhere in public what it has asked for. The first of a
part that has none it starts without asking them, for a call that waits for one: whoever calls says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from cluster.directory_actor import find_directory

logger = logging.getLogger(__name__)

Part = Literal["target", "draft"]
_TELL_S = 5.0
"""What has not changed is told again after so long: the directory may have begun anew."""
_FIND_AGAIN_S = 60.0
"""A handle that has grown so old is looked up anew: an actor that was made in its place has another."""
_FIND_SOON_S = 5.0
"""The same, where none was found."""
_READ_S = 5.0
_READ_TIMEOUT_S = 1.0


class WantedTeller:
    """Tells the directory what a policy has decided. For Serve's controller, which must not wait for it: what
    is lost is told again."""

    def __init__(
        self,
        namespace: str,
        part: Part,
        *,
        find: Callable[[str], Any] = find_directory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`find` may wait for Ray's head, and is called in a thread of its own."""
        self._namespace = namespace
        self._part = part
        self._find = find
        self._clock = clock
        self._directory: Any = None
        self._find_s = 0.0
        """When to look it up again."""
        self._finding: threading.Thread | None = None
        self._told: int | None = None
        self._told_s = 0.0

    def tell(self, number: int) -> None:
        """Say how many there should be now."""
        now_s = self._clock()
        if now_s >= self._find_s and (self._finding is None or not self._finding.is_alive()):
            self._find_s = now_s + _FIND_SOON_S
            self._finding = threading.Thread(target=self._look_up, name="find-directory", daemon=True)
            self._finding.start()
        is_due = number != self._told or now_s >= self._told_s + _TELL_S
        if self._directory is None or not is_due:
            return
        try:
            self._directory.note_wanted.remote(self._part, number)
        except (RayError, AttributeError) as error:  # the last: a directory of an older version
            logger.info("the directory cannot be told what is wanted: %s", error)
            self._directory = None
            return
        self._told, self._told_s = number, now_s

    def _look_up(self) -> None:
        self._directory = self._find(self._namespace)
        if self._directory is not None:
            self._find_s = self._clock() + _FIND_AGAIN_S


def tell_woken(namespace: str, part: Part) -> None:
    """Tell the directory that Serve was made to start the first one of a part. It may wait for Ray's head.

    What is lost is lost: who goes on waiting tells again.
    """
    directory = find_directory(namespace)
    if directory is None:
        return
    try:
        directory.note_woken.remote(part)
    except (RayError, AttributeError) as error:  # the last: a directory of an older version
        logger.info("the directory cannot be told who is waited for: %s", error)


def read_wanted(namespace: str) -> Mapping[str, int] | None:
    """Return by part how many there should be, where a policy decides it; None while nobody can say."""
    directory = find_directory(namespace)
    if directory is None:
        return None
    try:
        wanted: Mapping[str, int] = ray.get(directory.wanted.remote(), timeout=_READ_TIMEOUT_S)
    except (RayError, AttributeError):  # the last: a directory of an older version
        return None
    return wanted


class WantedNumbers:
    """How many there should be, as a door knows it: fixed, or what a policy has decided last.

    Until something is heard of a policy it is the number at first.
    """

    def __init__(
        self,
        namespace: str,
        at_first: Mapping[Part, int],
        *,
        follows: Collection[Part],
        read: Callable[[str], Mapping[str, int] | None] = read_wanted,
    ) -> None:
        """`follows`: of which parts a policy decides; these are read, in a thread of its own."""
        self._namespace = namespace
        self._numbers = dict(at_first)
        self._follows = frozenset(follows)
        self._read = read
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin to follow policies, if there are any."""
        if self._follows:
            threading.Thread(target=self._follow, name="wanted-numbers", daemon=True).start()

    def close(self) -> None:
        """Follow no more. What is being read is not waited for."""
        self._stop.set()

    def of(self, part: Part) -> int:
        """Return how many there should be (any thread)."""
        return self._numbers[part]

    def take(self, told: Mapping[str, int] | None) -> None:
        """Take in what the directory says; what it does not tell of stays as it was."""
        for part in self._follows:
            if told is not None and part in told:
                self._numbers[part] = int(told[part])

    def _follow(self) -> None:
        while not self._stop.is_set():
            self.take(self._read(self._namespace))
            self._stop.wait(_READ_S)
