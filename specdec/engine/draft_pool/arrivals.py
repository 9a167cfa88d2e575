"""When messages arrived that are read later."""

from __future__ import annotations

_DRIFT = 2e-5
"""How far two monotonic clocks run apart, seconds per second."""


class ArrivalClock:
    """Places the arrivals of one sender's messages in the reader's time.

    Between stamping and reading, a message spends its time on the wire and, if nobody waits for it, in a
    queue. What the quickest message took is wire alone, plus however far apart the two clocks are: what
    another took beyond that it lay waiting. Only differences of the sender's times mean anything. A reader
    that is always late thinks that arrivals are as late as it was at its quickest.
    """

    def __init__(self) -> None:
        self._least_s: float | None = None
        self._read_s = 0.0

    def arrival_s(self, sent_s: float, read_s: float) -> float:
        """Return when a message arrived: not after `read_s`.

        Args:
            sent_s: by the sender's clock.
            read_s: by the reader's clock; never falls from call to call.
        """
        gap_s = read_s - sent_s
        least_s = gap_s
        if self._least_s is not None:
            least_s = min(gap_s, self._least_s + _DRIFT * (read_s - self._read_s))
        self._least_s, self._read_s = least_s, read_s
        return sent_s + least_s
