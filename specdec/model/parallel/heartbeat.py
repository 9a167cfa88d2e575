"""Ranks that no longer run, though nothing has closed their links: stopped processes, machines cut off.

Every rank but the first writes a number to the group's store once a second, from a thread of its own, and
rank 0 looks at the numbers. So a long forward or an idle hour is no silence; a process that does not get to
run any Python is. A rank that runs without making progress is left to the time limit of the collectives.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torch.distributed import Store

from specdec.model.parallel.group import RankGroup

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
MAX_SILENT_LOOKS = 20
"""Looks of rank 0, `INTERVAL_S` apart, at an unchanged number. Looks and not seconds: a machine that is
stopped as a whole, or too busy for rank 0 as well, has not looked."""
_NOT_WATCHED = "-"


def looks_in(silence_s: float) -> int:
    """Return how many looks a silence of so many seconds takes at least."""
    return max(1, math.ceil(silence_s / INTERVAL_S))


@contextmanager
def beating(group: RankGroup, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Show rank 0, while the body runs, that this process does.

    When the body raises, silence follows: the process is expected to end.
    """
    store, key = group.open_store(), _key(group.rank)
    stop = threading.Event()
    thread = threading.Thread(target=_beat, args=(store, key, interval_s, stop), name="heart", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    with suppress(RuntimeError):  # rank 0 may be gone already
        store.set(key, _NOT_WATCHED)


def _beat(store: Store, key: str, interval_s: float, stop: threading.Event) -> None:
    count = 0
    while True:
        try:
            store.set(key, str(count))
        except RuntimeError:
            return  # rank 0 is gone, which whoever waits for its commands notices too
        if stop.wait(interval_s):
            return
        count += 1


class HeartbeatWatch:
    """Rank 0's look at the others."""

    def __init__(
        self,
        group: RankGroup,
        on_silence: Callable[[int], None],
        *,
        interval_s: float = INTERVAL_S,
        max_silent_looks: int = MAX_SILENT_LOOKS,
    ) -> None:
        """Watch ranks from their first beat on; `on_silence` is called once per rank, in another thread."""
        self._store = group.open_store()
        self._keys = {rank: _key(rank) for rank in range(1, group.size)}
        self._on_silence = on_silence
        self._interval_s = interval_s
        self._max_silent_looks = max_silent_looks
        self._stop = threading.Event()
        for key in self._keys.values():
            self._store.set(key, _NOT_WATCHED)
        self._thread = threading.Thread(target=self._watch, name="heart-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        silences = {rank: _Silence() for rank in self._keys}
        while not self._stop.wait(self._interval_s):
            for rank, silence in silences.items():
                num_looks = silence.look(self._store.get(self._keys[rank]))
                if num_looks == self._max_silent_looks:
                    logger.error("rank %d has been silent for %.0f s", rank, num_looks * self._interval_s)
                    self._on_silence(rank)


class _Silence:
    """How often a number has been looked at without a change."""

    def __init__(self) -> None:
        self._last = b""
        self._num_looks = 0

    def look(self, number: bytes) -> int:
        is_silent = number == self._last and number != _NOT_WATCHED.encode()
        self._num_looks = self._num_looks + 1 if is_silent else 0
        self._last = number
        return self._num_looks


def _key(rank: int) -> str:
    return f"heart-{rank}"
