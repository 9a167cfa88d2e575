"""Which kind of round is run from now on: the better one, with hysteresis."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specdec.core.decaying import kept_after
from specdec.scheduling.speculation.batch_sizes import is_as_large
from specdec.scheduling.speculation.goodput import Kind

_URGENT = 0.03
"""So much better plain decoding has to be to be gone back to at once, as a share."""
_CLEAR = 0.15
"""What is so much better, as a share, does not wait for what has gone back and forth: that was about as good
either way."""
_RESTLESS_S = 10.0
"""After so many seconds a switch counts half for how restless things are."""
_MOST_RESTLESS = 5.0


class KindSwitch:
    """Changes what is done for something better by a margin, and not too soon after the last time."""

    def __init__(self, *, margin: float, dwell_rounds: int) -> None:
        """Switch for something better by a share of `margin`, `dwell_rounds` after the last time."""
        self._margin = margin
        self._dwell_rounds = dwell_rounds
        self.kind: Kind | None = None
        """What is done but for trials; None: nothing was decided yet."""
        self.switched_round = 0
        self._switched_batch = 0
        self.num_switches = 0
        self._restless = 0.0

    def pass_time(self, seconds: float) -> None:
        """Calm down for so long."""
        self._restless *= kept_after(seconds, _RESTLESS_S)

    def review(
        self,
        now: int,
        rates: Mapping[Kind, float],
        num_sequences: int,
        are_compared: Callable[[Kind, Kind], bool] = lambda one, other: True,
    ) -> bool:
        """Think over what is done in round `now`, given the tokens per second of each kind there is.

        One way to draft takes another one's place where that is clearly better, or where both were compared
        (`are_compared`): what is known of it is of other times, or of none, and a trial costs little.

        Returns:
            whether something else is done from now on.
        """
        current = self.kind
        best = max(rates, key=lambda kind: rates[kind])
        if current is None:
            return self._set(now, best, num_sequences)
        if best == current or len(rates) == 1:
            return False  # alone: nobody can use a draft at this moment, which says nothing of those to come
        if current not in rates:  # ping_pong takes two
            return self._set(now, best, num_sequences)
        has_changed = not is_as_large(num_sequences, self._switched_batch)
        # What goes back and forth is about as good either way, and each change costs something.
        is_clear = rates[best] > rates[current] * (1.0 + _CLEAR)
        restless = 0.0 if has_changed or is_clear else max(0.0, min(self._restless, _MOST_RESTLESS) - 1.0)
        is_settled = now - self.switched_round >= self._dwell_rounds * 2.0**restless
        # Going back to plain decoding takes half as much, and where it is clearly better, no patience: it is
        # what nobody may be worse off than.
        margin = self._margin * (0.5 if best == "plain" else 1.0)
        is_urgent = best == "plain" and rates[best] > rates[current] * (1.0 + _URGENT)
        if not (has_changed or is_settled or is_urgent):
            return False
        is_told = "plain" in (current, best) or has_changed or is_clear or are_compared(current, best)
        if is_told and rates[best] > rates[current] * (1.0 + margin):
            return self._set(now, best, num_sequences)
        return False

    def _set(self, now: int, kind: Kind, num_sequences: int) -> bool:
        self.num_switches += self.kind is not None
        self._restless += self.kind is not None
        self.kind = kind
        self.switched_round = now
        self._switched_batch = num_sequences
        return True
