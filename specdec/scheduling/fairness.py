"""Whose turn it is, among owners (API keys) that keep requests waiting."""

from __future__ import annotations


class FairTurns:
    """Start-time fair queueing: owners get equally many tokens, however many requests each has waiting.

    A request's turn is a virtual time: where its owner's requests before it end, but never before what was
    started last. An owner with one request is so never behind the thousand of another, and whoever was away
    has saved nothing up. With one owner, turns are in order of arrival.
    """

    __slots__ = ("_ends", "_now")

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str | None, int] = {}
        """Where the last request of each owner ends."""

    def next_turn(self, owner: str | None) -> int:
        """Return the turn that the owner's next request would have."""
        return max(self._now, self._ends.get(owner, 0))

    def take(self, owner: str | None, num_tokens: int) -> int:
        """Return the turn of a request of about so many tokens, which waits from now on."""
        turn = self.next_turn(owner)
        self._ends[owner] = turn + num_tokens
        return turn

    def give_back(self, owner: str | None, num_tokens: int) -> None:
        """A request of so many tokens left before it was started: its owner does not pay for it."""
        if owner in self._ends:
            self._ends[owner] -= num_tokens

    def note_idle(self) -> None:
        """Nobody waits or runs any more: what was is forgotten."""
        self._now = 0
        self._ends.clear()

    def note_start(self, turn: int) -> None:
        """A request of this turn has been started for the first time."""
        self._now = max(self._now, turn)
