"""What has arrived and has not been read yet: whose turn is next, and how much of whom there may be."""

from __future__ import annotations

import heapq
import itertools
from typing import Final, Generic, TypeVar

from specdec.transport.base import PeerId

Item = TypeVar("Item")

TURN_BYTES: Final = 1 << 16
"""Of one sender, before all others that wait have had as much. Ordinary messages are far smaller, and are
read in the order in which they came."""


class _Account:
    """What one sender has in the inbox."""

    __slots__ = ("num_bytes", "num_items", "taken_bytes", "turn")

    def __init__(self) -> None:
        self.num_items = self.num_bytes = 0
        self.turn = self.taken_bytes = 0
        """The turn in which its next item will be read, and what that turn has of it already."""


class Inbox(Generic[Item]):
    """Items of many senders, each sender's in the order in which they came.

    Turns go by bytes: whoever brings much waits for those who bring little. These wait for one turn of each
    of the others at most, and the item that ends it. Debts are forgotten once nothing waits.
    """

    def __init__(self, *, max_items: int, max_bytes: int) -> None:
        """Hold at most that much of each sender, and one item however large it is."""
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._line: list[tuple[int, int, PeerId, int, Item]] = []
        """A heap of turn, order of arrival, sender, bytes, item."""
        self._order = itertools.count()
        self._turn = 0
        self._accounts: dict[PeerId, _Account] = {}

    def __len__(self) -> int:
        return len(self._line)

    def has_room(self, sender: PeerId, num_bytes: int) -> bool:
        """Whether one more item of a sender may be put in."""
        its = self._accounts.get(sender)
        return its is None or (
            its.num_items < self._max_items
            and (its.num_bytes == 0 or its.num_bytes + num_bytes <= self._max_bytes)
        )

    def put(self, sender: PeerId, item: Item, num_bytes: int) -> None:
        """Put an item in, whether there is room for it or not."""
        its = self._accounts.get(sender)
        if its is None:
            its = self._accounts[sender] = _Account()
        if its.turn < self._turn:
            its.turn, its.taken_bytes = self._turn, 0
        heapq.heappush(self._line, (its.turn, next(self._order), sender, num_bytes, item))
        its.num_items += 1
        its.num_bytes += num_bytes
        its.taken_bytes += num_bytes
        if its.taken_bytes >= TURN_BYTES:
            its.turn += its.taken_bytes // TURN_BYTES
            its.taken_bytes %= TURN_BYTES

    def take(self) -> tuple[PeerId, Item, int]:
        """Return whose item is next, the item and its bytes; there must be one."""
        self._turn, _, sender, num_bytes, item = heapq.heappop(self._line)
        if self._line:
            its = self._accounts[sender]
            its.num_items -= 1
            its.num_bytes -= num_bytes
        else:
            self._accounts.clear()
            self._turn = 0
        return sender, item, num_bytes
