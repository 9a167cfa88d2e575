"""Whose turn it is, among owners (API keys) that keep requests waiting."""

from __future__ import annotations

from collections import defaultdict


class FairTurns:
    """Start-time fair queueing: owners get equally many tokens, however many requests each has waiting.

    A request's turn is a virtual time: where its owner's requests before it end, but never before what was
    started last. An owner with one request is so never behind the thousand of another, and whoever was away
    has saved nothing up. With one owner, turns are in order of arrival.

    Each priority has turns of its own: what an owner has waiting at one that is less urgent says nothing of
    whose turn it is among those that go before.
    """

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: defaultdict[int, _Line] = defaultdict(_Line)

    def next_turn(self, owner: str | None, priority: int = 0) -> int:
        """Return the turn that the owner's next request of this priority would have."""
        return self._lines[priority].next_turn(owner)

    def take(self, owner: str | None, num_tokens: int, priority: int = 0) -> int:
        """Return the turn of a request of about so many tokens, which waits from now on."""
        line = self._lines[priority]
        turn = line.next_turn(owner)
        line.ends[owner] = turn + num_tokens
        return turn

    def give_back(self, owner: str | None, num_tokens: int, priority: int = 0) -> None:
        """A request of so many tokens left before it was started: its owner does not pay for it."""
        self.settle(owner, -num_tokens, priority)

    def settle(self, owner: str | None, num_more: int, priority: int = 0) -> None:
        """A request has ended that had so many tokens more, or fewer, than it was taken for: its owner's next
        ones pay for them.
        """
        ends = self._lines[priority].ends
        if owner in ends:
            ends[owner] += num_more

    def note_idle(self) -> None:
        """Nobody waits or runs any more: what was is forgotten."""
        self._lines.clear()

    def note_start(self, turn: int, priority: int = 0) -> None:
        """A request of this turn has been started for the first time."""
        line = self._lines[priority]
        line.now = max(line.now, turn)


class _Line:
    """Those of one priority."""

    __slots__ = ("ends", "now")

    def __init__(self) -> None:
        self.now = 0
        self.ends: dict[str | None, int] = {}
        """Where the last request of each owner ends."""

    def next_turn(self, owner: str | None) -> int:
        return max(self.now, self.ends.get(owner, 0))
