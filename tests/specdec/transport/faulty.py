"""What the memory transport does to messages, done to those of any other."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from functools import partial

from specdec.core.errors import ChannelTimeout
from specdec.transport.base import Channel, Envelope, PeerId
from specdec.transport.memory import Faults
from specdec.transport.messages import Message
from specdec.transport.wrapped import WrappedChannel


class FaultyChannel(WrappedChannel):
    """Loses, doubles, delays and perhaps reorders what is sent.

    What is delayed leaves while the owner listens or sends.
    """

    def __init__(self, inner: Channel, faults: Faults, seed: int) -> None:
        super().__init__(inner)
        self.faults = faults
        self.num_lost = 0
        self._random = random.Random(seed)
        self._order = itertools.count()
        self._held: list[tuple[float, int, Callable[[], None]]] = []
        self._link_free_s: dict[PeerId, float] = {}

    def send(self, peer_id: PeerId, message: Message) -> None:
        copies = (self._random.random() >= self.faults.loss) + (
            self._random.random() < self.faults.duplication
        )
        self.num_lost += copies == 0
        for _ in range(copies):
            due_s = time.monotonic() + self._random.uniform(*self.faults.delay_s)
            if self.faults.in_order:
                due_s = self._link_free_s[peer_id] = max(due_s, self._link_free_s.get(peer_id, 0.0))
            heapq.heappush(self._held, (due_s, next(self._order), partial(self.inner.send, peer_id, message)))
        self._release()

    def receive(self, timeout_s: float | None) -> Envelope:
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._release()
            now_s = time.monotonic()
            next_s = min(until_s, self._held[0][0] if self._held else until_s)
            wait_s = None if next_s == float("inf") else max(0.0, next_s - now_s)
            try:
                return self.inner.receive(wait_s)
            except ChannelTimeout:
                if time.monotonic() >= until_s:
                    raise

    def _release(self) -> None:
        while self._held and self._held[0][0] <= time.monotonic():
            heapq.heappop(self._held)[2]()
