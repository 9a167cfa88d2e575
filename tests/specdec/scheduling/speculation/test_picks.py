"""What is picked is bounded, whoever says who has gone."""

from __future__ import annotations

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.picks import _MOST_PICKS, remember


def test_those_whom_nobody_reviews_are_forgotten_once_they_are_very_many() -> None:
    """Where prompts alone are read nothing decodes, and nothing is decided."""
    picks: dict[RequestId, int] = {}
    for number in range(3 * _MOST_PICKS):
        remember(picks, RequestId(f"r{number}"), number % 2)
        assert len(picks) <= _MOST_PICKS
    newest = range(3 * _MOST_PICKS - _MOST_PICKS // 2, 3 * _MOST_PICKS)
    assert all(picks[RequestId(f"r{number}")] == number % 2 for number in newest)
