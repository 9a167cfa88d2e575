"""Which rounds are as many of their kind would be, and which are still those of a change."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.scheduling.speculation.controller import RoundObservation
from specdec.scheduling.speculation.goodput import Kind

_TRANSIENT_ROUNDS: Mapping[Kind, int] = {"plain": 1, "lockstep": 0, "ping_pong": 2, "draft_ahead": 3}
"""Rounds after a change of kind that say nothing of it: drafts are not there yet, or no more under way."""
_MOST_CATCHING_UP = 32
"""Rounds behind a change in which a drafter may have to catch up; if it still has then, it always has."""
_ROUNDS_TO_CALM_DOWN = 2
"""After rounds in which the drafter worked beside the target it goes on for a while: the first rounds
without it are not yet alone."""


def num_unsettled(kind: Kind, before: Kind) -> int:
    """Return how many rounds of a kind say nothing of it, after those of another one."""
    is_alone, was_alone = (one in ("plain", "lockstep") for one in (kind, before))
    return max(_TRANSIENT_ROUNDS[kind], _ROUNDS_TO_CALM_DOWN if is_alone and not was_alone else 0)


class Settling:
    """Looks at the kinds of rounds that ran last."""

    def __init__(self) -> None:
        """Begin as if there had been plain rounds for long."""
        self._kind: Kind = "plain"
        self._num_alike = 0
        self._num_since_overlap = _ROUNDS_TO_CALM_DOWN
        self._is_catching_up = False

    def note(self, observation: RoundObservation) -> Kind:
        """Take in a round, and return its kind."""
        kind = kind_of(observation)
        has_been_off = self._kind == "plain" and kind != "plain"
        self._num_alike = self._num_alike + 1 if kind == self._kind else 0
        may_catch_up = has_been_off or (self._is_catching_up and self._num_alike < _MOST_CATCHING_UP)
        self._is_catching_up = may_catch_up and observation.is_behind
        is_overlapped = observation.mode != "lockstep"
        self._num_since_overlap = 0 if is_overlapped else self._num_since_overlap + 1
        self._kind = kind
        return kind

    @property
    def is_alike(self) -> bool:
        """Whether rounds have been of the last one's kind for long enough to say something of it."""
        return self._num_alike >= _TRANSIENT_ROUNDS[self._kind] and not self._is_catching_up

    @property
    def is_catching_up(self) -> bool:
        """Whether drafters still read, in the last round, what had been committed while nothing was drafted.

        That is paid for once. Taken for what drafting takes, it would make drafts look too dear to be tried
        again for long, and each trial would show the same.
        """
        return self._is_catching_up

    @property
    def is_calm(self) -> bool:
        """Whether nothing but plain rounds has run for a while."""
        return (
            self._kind == "plain" and self._num_alike > 0 and self._num_since_overlap > _ROUNDS_TO_CALM_DOWN
        )

    @property
    def is_as_it_seems(self) -> bool:
        """Whether what ran last had the machine for itself, if it should have."""
        return self._num_since_overlap == 0 or self._num_since_overlap > _ROUNDS_TO_CALM_DOWN


def kind_of(observation: RoundObservation) -> Kind:
    """Return what kind of round that was: plain where nothing was asked for and nothing came."""
    if observation.mode == "lockstep" and not observation.outcomes and not any(observation.budgets.values()):
        return "plain"
    return observation.mode
