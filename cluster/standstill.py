"""When nobody was heard because nobody could be: that time is left out of the silences of others."""

from __future__ import annotations

import math
from typing import Final

ORDINARY_PAUSE_S: Final = 1.0
"""Between two looks of who looks about twice a second."""


class Standstill:
    """Notices that this process was stopped, starved or cut off.

    What others said meanwhile is among what it takes in next, but not before the first of it, by which all of
    them would seem to be gone.
    """

    def __init__(self, *, ordinary_s: float = 0.0) -> None:
        """`ordinary_s`: as long a time between two looks means nothing, however short leases are."""
        self._ordinary_s = ordinary_s
        self._looked_s = math.inf

    def forgiven_s(self, now_s: float, lease_s: float) -> float:
        """Look; return how long nobody has looked before, or 0 where that was no standstill.

        `lease_s`: a silence as long is the end of whoever is silent.
        """
        passed_s = now_s - self._looked_s
        self._looked_s = now_s
        # Who speaks every third of a lease has so much of it left at any time.
        return passed_s if passed_s > max(lease_s * 2 / 3, self._ordinary_s) else 0.0
