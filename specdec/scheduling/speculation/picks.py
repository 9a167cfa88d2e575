"""What is picked for each request, as long as the request is there."""

from __future__ import annotations

from collections.abc import Set

from specdec.core.ids import RequestId

_MOST_PICKS = 65_536
"""Far beyond four times the most that can run at once, which `without_gone` leaves: who is present is never
forgotten while picks are thought over."""


def remember(picks: dict[RequestId, int], request_id: RequestId, pick: int) -> None:
    """Note what was picked for a new request.

    While nothing decodes, nobody says who has gone: of very many the older half is forgotten.
    """
    if len(picks) >= _MOST_PICKS:
        # A list: who asks for metrics, in another thread, may be the first to ask what a request gets.
        for oldest in list(picks)[: _MOST_PICKS // 2]:
            picks.pop(oldest, None)
    picks[request_id] = pick


def without_gone(picks: dict[RequestId, int], present: Set[RequestId]) -> dict[RequestId, int]:
    """Return what was picked for those who are present, once most are not."""
    if len(picks) <= 4 * len(present) + 64:
        return picks
    # Who asks for metrics, in another thread, may be the first to ask what a request gets.
    there = list(picks.items())
    return {one: pick for one, pick in there if one in present}
