"""Whose blocks are taken when the pool is empty."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.scheduling.state import Schedulable


def choose_victim(needy: Schedulable, candidates: Iterable[Schedulable]) -> Schedulable:
    """Return who is preempted so that `needy` can go on: possibly `needy` itself.

    Only requests after `needy` in order of service are taken, the one that loses the least computed
    tokens first (of equals, the last in order). So nobody is ever preempted for the sake of someone
    behind, the first in order always goes on, and by induction everyone finishes: two big requests
    cannot take turns in preempting each other.
    """
    victim = needy
    for candidate in candidates:
        if candidate.service_key <= needy.service_key:
            continue
        if victim is needy or _loss(candidate) < _loss(victim):
            victim = candidate
    return victim


def _loss(request: Schedulable) -> tuple[int, int, int]:
    key = request.service_key
    return request.num_computed, -key.priority, -key.arrival
