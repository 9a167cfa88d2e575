"""Who decides how many tokens are drafted for each request, each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.core.ids import RequestId
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

    num_rows: int
    """Rows of the target's forward, draft rows included."""
    num_sequences: int
    num_committed: int
    draft_s: float
    """Seconds that the round waited for proposals."""
    verify_s: float
    """Seconds from the submission of the target's step to its answer."""
    outcomes: Sequence[DraftOutcome]


class SpeculationController(Protocol):
    """Chooses k. It never affects which tokens come out, only how soon.

    Two bounds hold whatever it answers: a request's own k, where it gives one, and what is of use
    before max_tokens and the context limit. The scheduler may cut k further for want of rows or blocks.
    """

    def choose(self, decoding: Sequence[Schedulable]) -> Sequence[int]:
        """Return the wanted number of draft tokens of each sequence, in the same order."""
        ...

    def observe(self, observation: RoundObservation) -> None:
        """Learn from a finished round."""
        ...


class FixedController:
    """The same k for everyone, always."""

    def __init__(self, num_draft_tokens: int) -> None:
        """Draft `num_draft_tokens` (0 switches speculation off)."""
        if num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens must not be negative, got {num_draft_tokens}")
        self._num_draft_tokens = num_draft_tokens

    def choose(self, decoding: Sequence[Schedulable]) -> Sequence[int]:
        """Return k for each."""
        return [self._num_draft_tokens] * len(decoding)

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
