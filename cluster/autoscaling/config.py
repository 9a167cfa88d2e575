"""Bounds, targets and pace of scaling."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from specdec.core.config import StrictConfig


class PaceConfig(StrictConfig):
    """How soon a wish becomes a change."""

    up_after_s: float = Field(default=10.0, ge=0)
    """More are started once they have been wanted for so many seconds without a break."""
    down_after_s: float = Field(default=300.0, ge=0)
    """Some are stopped, after their streams have ended, once they were not needed for so many seconds."""
    cooldown_s: float = Field(default=60.0, ge=0)
    """Nothing is stopped for so many seconds after the last change; the last of all goes by
    `scale_to_zero_after_s` alone."""
    start_patience_s: float = Field(default=900.0, gt=0)
    """Of those that were asked for and do not serve, none having come to serve for so many seconds, it is
    thought that they never will: as many more may be asked for, within the bounds."""
    scale_to_zero_after_s: float = Field(default=900.0, gt=0)
    """With a lower bound of 0: the last one is stopped once there was no request at all for so many seconds.
    The next request starts one, and waits for it."""


class TargetScalingConfig(PaceConfig):
    """How many target groups there are. One more or less is always a whole group, with all its ranks."""

    min_groups: int = Field(default=1, ge=0)
    """Fewest target groups; 0: none while nobody asks for anything."""
    max_groups: int = Field(ge=1)
    """Most target groups."""
    target_occupancy: float = Field(default=0.8, gt=0, le=1)
    """How full the groups are: of places for requests (`scheduler.max_num_seqs`) or of KV memory, whichever
    is fuller, those that wait included. More groups are wanted above, fewer where the rest would stay well
    below."""
    target_queue_wait_s: float = Field(default=1.0, gt=0)
    """More groups are wanted when one would wait longer than that in a group's queue."""
    target_itl_ms: float | None = Field(default=None, gt=0)
    """More groups are wanted when a round, and so the time between two deliveries of a stream, takes longer
    than that, up to one for each running request: batches cannot get smaller. None: no matter."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_groups > self.max_groups:
            raise ValueError(f"min_groups ({self.min_groups}) must be at most max_groups ({self.max_groups})")
        return self


class DraftScalingConfig(PaceConfig):
    """How many draft workers there are."""

    min_workers: int = Field(default=1, ge=0)
    """Fewest draft workers; 0: none while nobody asks for anything."""
    max_workers: int = Field(ge=1)
    """Most draft workers."""
    target_utilization: float = Field(default=0.8, gt=0, le=1)
    """More workers may be wanted when the pool drafts for a larger share of the time, or has a larger share
    of its places taken (`shares.max_sequences`). A worker that refuses requests, for want of memory too,
    counts as full."""
    min_gain: float = Field(default=0.05, ge=0, lt=1)
    """More workers are wanted only if one more could bring at least this share of goodput; fewer, if one less
    would cost less than half of it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers ({self.min_workers}) must be at most max_workers ({self.max_workers})"
            )
        return self


def initial_number(number: int, *, is_given: bool, bounds: tuple[int, int], names: tuple[str, str]) -> int:
    """Return how many there are at first: what was given, or else the number within the bounds next to it.

    Raises:
        ValueError: what was given is outside the bounds.
    """
    low, high = bounds
    if is_given and not low <= number <= high:
        name, kind = names
        raise ValueError(
            f"{name} ({number}) is how many there are at first: it must be from autoscaling.min_{kind} "
            f"({low}) to autoscaling.max_{kind} ({high}), or be left out"
        )
    return min(max(number, low), high)
