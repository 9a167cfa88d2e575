"""How the coordinators that one draft worker serves share it: its places, and every batch of drafts."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from pydantic import Field

from specdec.core.config import StrictConfig

Wish = TypeVar("Wish")


class DraftShareConfig(StrictConfig):
    """What one draft worker takes on, and how much of it at a time."""

    max_sequences: int | None = Field(default=None, ge=1)
    """Sequences that one draft worker takes; None: as many as all coordinators may have running, so that one
    worker can serve them all. A coordinator is always given its equal share."""
    lease_s: float = Field(default=600.0, gt=0)
    """A sequence that nobody has asked about for so many seconds is forgotten: its release was lost."""
    max_batch_entries: int = Field(default=256, ge=1)
    """Sequences drafted for at a time; the others wait for the next batch."""
    max_batch_rows: int = Field(default=8192, ge=1)
    """Unseen and drafted tokens of one batch."""
    max_batch_branches: int = Field(default=1024, ge=1)
    """Continuations of assumed verdicts in one batch."""

    def part_of_batch(self, num_rows: int, num_branches: int) -> float:
        """Return how much of a batch an entry takes, by whatever it has most of; a batch is 1."""
        part = num_rows / self.max_batch_rows
        if part < 1 / self.max_batch_entries:
            part = 1 / self.max_batch_entries
        return part if num_branches == 0 else max(part, num_branches / self.max_batch_branches)


def fair_batch(queues: Sequence[Sequence[tuple[Wish, float]]]) -> list[Wish]:
    """Return what is served next: whoever has had least of the batch is next to be served from its queue.

    What does not fit the batch ends its owner's part of it, unless nothing is in it yet. So whoever is
    first is served, whatever it costs, and everybody is within as many batches as there are owners, if the
    first of one batch is the last of the next.

    Args:
        queues: of each owner, in the order of their turns: its wishes, in the order of theirs, and which
            part of a batch each takes (`DraftShareConfig.part_of_batch`).
    """
    if sum([part for queue in queues for _, part in queue]) <= 1.0:
        return [wish for queue in queues for wish, _ in queue]
    line: list[tuple[float, int, Iterator[tuple[Wish, float]]]] = [
        (0.0, turn, iter(queue)) for turn, queue in enumerate(queues)
    ]
    batch: list[Wish] = []
    total = 0.0
    while line:
        taken, turn, queue = heapq.heappop(line)
        wish, part = next(queue, (None, 0.0))
        if wish is None or (batch and total + part > 1.0 + 1e-9):
            continue
        batch.append(wish)
        total += part
        heapq.heappush(line, (taken + part, turn, queue))
    return batch


def equal_share(total: int, owners: Iterable[Hashable], asking: Hashable) -> int:
    """Return how much of `total` is certain for the one who asks, with those who have some already."""
    return total // len({*owners, asking})
