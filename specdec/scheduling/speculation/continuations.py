"""Drafting ahead as the controller sees it: how continuations are shared out, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specdec.core.decaying import moved
from specdec.core.ids import RequestId
from specdec.core.proposal import AheadOutcome
from specdec.scheduling.speculation.controller import RoundObservation
from specdec.scheduling.speculation.decision import NUM_LEVELS, Decision
from specdec.scheduling.speculation.goodput import AheadOutlook
from specdec.scheduling.speculation.guesses import GuessRanks, share_guesses, share_guesses_behind_foreign
from specdec.scheduling.speculation.standins import StandIns

_MAX_FAN_OUTS = 4096
_FAN_OUT_ROUNDS = 512
"""Shares are worked out anew after so many rounds: more is known of ranks then."""
_LATE_DECAY = 1.0 / 64.0
_LATE_FORGIVEN_ROUNDS = 512.0


class Continuations:
    """Learns which guesses are right, how many come in time, and what stands in for those that do not."""

    def __init__(self, max_branches: int, num_positions: int) -> None:
        """Prepare at most `max_branches` continuations per request, behind up to `num_positions` tokens."""
        self._max_branches = max_branches
        self._ranks = GuessRanks()
        self._in_time = 1.0
        self._stand_ins = StandIns(num_positions)
        self._fan_outs: dict[tuple[bytes, int, int], tuple[int, ...]] = {}

    @property
    def outlook(self) -> AheadOutlook:
        """What is known of drafting ahead."""
        return AheadOutlook(
            rates=self._ranks.rates,
            max_branches=self._max_branches,
            in_time=self._in_time,
            stand_in_gain=self._stand_ins.gain,
            stand_in_rows=self._stand_ins.rows,
        )

    @property
    def stand_in_gain(self) -> float:
        """Accepted tokens of a proposal that stands in, where there is one."""
        return self._stand_ins.gain_if_there

    def shares(
        self,
        decision: Decision | None,
        request_id: RequestId,
        num_pending: int,
        max_branches: int,
        *,
        is_foreign: bool,
    ) -> tuple[int, ...]:
        """Share out continuations of a request, as `SpeculationController.fan_out` says."""
        if decision is None:
            return (0,) * (num_pending + 1)
        at = decision.index.get(request_id)
        num_branches = min(max_branches, decision.option.num_branches)
        if num_pending == 0:
            return (num_branches,)
        # Who has come since is like the others: left out, it would be waited for in each round.
        levels = decision.usual_levels if at is None else decision.acceptance_levels[at]
        if is_foreign:
            own = (levels[0] + 0.5) / NUM_LEVELS
            accepted = self._stand_ins.accepted[:num_pending]
            return share_guesses_behind_foreign(accepted, own, self._ranks.rates, num_branches)
        key = (levels[: num_pending + 1], num_pending, num_branches)
        shared = self._fan_outs.get(key)
        if shared is None:
            depths = np.minimum(np.arange(num_pending + 1), len(levels) - 1)
            accepted = (np.frombuffer(levels, np.uint8)[depths] + 0.5) / NUM_LEVELS
            shared = share_guesses(accepted, self._ranks.rates, num_branches)
            self._fan_outs[key] = shared
        return shared

    def owed(self, observation: RoundObservation, decision: Decision) -> Mapping[RequestId, int]:
        """Return whose drafts should have been there in a round, and how many.

        Behind a round of draft_ahead, what is missing is not there. Most that are missing were not foreseen,
        which is no fault of the drafter's: it owes what was foreseen, and what it was asked for and has not
        prepared.
        """
        if not observation.ahead:
            return observation.budgets
        excused = {
            ahead.request_id
            for ahead in observation.ahead
            if (ahead.rank is None or ahead.is_late) and not self._is_unprepared(ahead, decision)
        }
        return {one: budget for one, budget in observation.budgets.items() if one not in excused}

    def _is_unprepared(self, ahead: AheadOutcome, decision: Decision) -> bool:
        """Return whether nothing was prepared for a verdict that something was asked for."""
        if ahead.num_prepared > 0 or ahead.is_late:
            return False
        shared = self.shares(
            decision,
            ahead.request_id,
            ahead.num_pending,
            self._max_branches,
            is_foreign=ahead.is_foreign,
        )
        return shared[ahead.num_accepted] > 0

    def note(self, now: int, observation: RoundObservation) -> None:
        """Learn from round `now`: what stood in, and what became of continuations."""
        is_ahead = observation.mode == "draft_ahead"
        if observation.stand_ins or (self._stand_ins.are_there and is_ahead):
            num_wanted = sum(budget > 0 for budget in observation.budgets.values())
            self._stand_ins.note(num_wanted - len(observation.outcomes), observation.stand_ins)
        if len(self._fan_outs) > _MAX_FAN_OUTS or now % _FAN_OUT_ROUNDS == 0:
            self._fan_outs.clear()
        for ahead in observation.ahead:
            self._note_ahead(ahead)
        if not is_ahead:  # what was late once need not be so for ever
            self._in_time = moved(self._in_time, 1.0, 1.0 / _LATE_FORGIVEN_ROUNDS)

    def _note_ahead(self, ahead: AheadOutcome) -> None:
        self._in_time = moved(self._in_time, 0.0 if ahead.is_late else 1.0, _LATE_DECAY)
        self._ranks.hear(ahead)
