"""Whose blocks are taken when the pool is empty."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from specdec.scheduling.state import Schedulable

NumLost = Callable[[Schedulable], int]
"""How many computed tokens a request would have to compute again."""


def choose_victim(needy: Schedulable, candidates: Iterable[Schedulable], num_lost: NumLost) -> Schedulable:
    """Return who is preempted so that `needy` can go on: possibly `needy` itself.

    Only requests after `needy` in order of service are taken: the least urgent priority first, there the
    one that loses the least computed tokens, of equals the last in order. So nobody is ever preempted for
    the sake of someone behind, the first in order always goes on, and by induction everyone finishes: two
    big requests cannot take turns in preempting each other.
    """
    behind = [one for one in candidates if one.service_key > needy.service_key]
    return min(behind, key=lambda one: _loss(one, num_lost), default=needy)


def _loss(request: Schedulable, num_lost: NumLost) -> tuple[int, int, int]:
    key = request.service_key
    return -key.priority, num_lost(request), -key.arrival
