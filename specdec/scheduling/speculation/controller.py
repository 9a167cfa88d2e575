"""Who decides how many tokens are drafted for each request, each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.state import Schedulable


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutcome:
    """What became of one proposal."""

    request_id: RequestId
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundObservation:
    """What one round cost and brought, for a controller to learn from."""

    mode: OverlapMode = "lockstep"
    num_rows: int
    """Rows of the target's forward, draft rows included."""
    num_sequences: int
    num_context_tokens: int = 0
    """K/V that these rows look at beside their own, all sequences together."""
    num_committed: int
    draft_s: float
    """Seconds that the round waited for proposals."""
    verify_s: float
    """Seconds from the submission of the target's step to its answer. With two rounds in flight, it includes
    the wait for the other one."""
    target_s: float = 0.0
    """Seconds that the target itself has measured: forward and choice of tokens."""
    elapsed_s: float = 0.0
    """Seconds since the round before ended, or since this one began, if that was later."""
    outcomes: Sequence[DraftOutcome]


class SpeculationController(Protocol):
    """Chooses k. It never affects which tokens come out, only how soon.

    Two bounds hold whatever it answers: a request's own k, where it gives one, and what is of use
    before max_tokens and the context limit. The scheduler may cut k further for want of rows or blocks.
    """

    @property
    def mode(self) -> OverlapMode:
        """How the next round is to be run, where the proposer can do it."""
        ...

    def choose(self, decoding: Sequence[Schedulable]) -> Sequence[int]:
        """Return the wanted number of draft tokens of each sequence, in the same order."""
        ...

    def look_ahead(self, sequence: Schedulable, num_pending: int) -> tuple[int, Sequence[int]]:
        """Say what to prepare while `num_pending` draft tokens of a sequence are verified (draft_ahead).

        Returns:
            How many tokens to draft behind an assumed verdict (0: prepare nothing), and for each number
            0 .. num_pending of tokens that may stand, how many tokens behind them to prepare for.
        """
        ...

    def observe(self, observation: RoundObservation) -> None:
        """Learn from a finished round."""
        ...


class FixedController:
    """The same k for everyone, always, and the same mode."""

    def __init__(
        self, num_draft_tokens: int, *, mode: OverlapMode = "lockstep", num_branches: int = 8
    ) -> None:
        """Draft `num_draft_tokens` (0 switches speculation off); ahead, for so many verdicts at most."""
        if num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens must not be negative, got {num_draft_tokens}")
        self._num_draft_tokens = num_draft_tokens
        self._num_branches = num_branches
        self._mode = mode

    @property
    def mode(self) -> OverlapMode:
        """As given."""
        return self._mode

    def choose(self, decoding: Sequence[Schedulable]) -> Sequence[int]:
        """Return k for each."""
        return [self._num_draft_tokens] * len(decoding)

    def look_ahead(self, sequence: Schedulable, num_pending: int) -> tuple[int, Sequence[int]]:
        """Share the branches out evenly, the rest to the longest and then the shortest acceptance."""
        wanted = sequence.requested_draft_tokens
        num_tokens = self._num_draft_tokens if wanted is None else wanted
        share, rest = divmod(self._num_branches, num_pending + 1)
        fan_out = [share] * (num_pending + 1)
        for position in [num_pending, *range(num_pending)][:rest]:
            fan_out[position] += 1
        return num_tokens, fan_out

    def observe(self, observation: RoundObservation) -> None:
        """Nothing to learn."""


def bounded_choice(controller: SpeculationController, decoding: Sequence[Schedulable]) -> list[int]:
    """Return the controller's choice within the bounds that hold for every controller."""
    return [
        min(
            chosen if sequence.requested_draft_tokens is None else sequence.requested_draft_tokens,
            sequence.max_draft_tokens,
        )
        for sequence, chosen in zip(decoding, controller.choose(decoding), strict=True)
    ]
