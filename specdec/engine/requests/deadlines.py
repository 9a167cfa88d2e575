"""Requests that may last only so long."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from specdec.engine.requests.live_request import LiveRequest

_FEW = 64


class Deadlines:
    """Live requests by the time at which they end whatever happens, soonest first.

    Those that have ended otherwise are dropped now and then: never more than twice as many as live are kept.
    """

    __slots__ = ("_entries", "_limit")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, LiveRequest]] = []
        self._limit = _FEW

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, deadline_s: float, live: LiveRequest) -> None:
        """Take note of a request's deadline, on the engine's clock."""
        if len(self._entries) >= self._limit:
            self._entries = [entry for entry in self._entries if entry[2].finish is None]
            heapify(self._entries)
            self._limit = max(_FEW, 2 * len(self._entries))
        heappush(self._entries, (deadline_s, live.service_key.arrival, live))

    def take_due(self, now_s: float) -> list[LiveRequest]:
        """Return requests whose time is up and that have not ended, once."""
        due: list[LiveRequest] = []
        while self._entries and self._entries[0][0] <= now_s:
            live = heappop(self._entries)[2]
            if live.finish is None:
                due.append(live)
        return due
