"""What passes beside work on drafts until they are there."""

from __future__ import annotations

from collections import deque

_NUM_RECENT, _FEW_SHORTER = 48, 16
"""Rounds that tell it, of which one in so many may have said less."""


class DraftWire:
    """Seconds of the way to a drafter and back: as many, however long drafts are.

    Where a draft worker has others before it in the queue, that passes too; but the quickest rounds waited
    for nobody.
    """

    def __init__(self, measured_s: float) -> None:
        """Begin with what was measured at the start; 0: nothing was."""
        self._recent = deque([measured_s] if measured_s > 0.0 else (), maxlen=_NUM_RECENT)

    @property
    def seconds(self) -> float:
        """What is to be expected: about the least of what was lately seen; 0 where nothing was."""
        recent = sorted(self._recent)
        return recent[len(recent) // _FEW_SHORTER] if recent else 0.0

    def note(self, seconds: float) -> None:
        """Learn from a round in which so much passed beside the work."""
        self._recent.append(seconds)
