"""Which draft worker a sequence is given to, and when it is taken away again: pure decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from specdec.engine.draft_patience import DraftPatience

WorkerT = TypeVar("WorkerT")


def choose_draft_worker(
    candidates: Sequence[WorkerT], num_registered: Callable[[WorkerT], int]
) -> WorkerT | None:
    """Return the candidate with the fewest sequences of this coordinator, of equals the first.

    None where there is no candidate.
    """
    return min(candidates, key=num_registered, default=None)


def is_given_up(patience: DraftPatience, now_s: float, reassign_after_s: float) -> bool:
    """Whether sequences of this worker should move, provided that another one is waited for."""
    return patience.late_for_s(now_s) > reassign_after_s
