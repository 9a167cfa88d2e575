"""The `speculative_config.synthetic_acceptance` block, of benchmarks alone."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from specdec.core.config import StrictConfig
from specdec.proposers.lookup_config import Probability


class SyntheticAcceptance(StrictConfig):
    """How often a made-up target agrees with the draft model; see `engine.synthetic`."""

    acceptance: tuple[Probability, ...] = Field(min_length=1)
    """Entry i: probability that draft token i stands, given that those before it do; the last entry goes for
    all further ones."""
    bonus_after_miss: tuple[Probability, ...] = (0.35, 0.50, 0.63)
    """Entry F - 1: probability that what takes the place of a rejected token is among the drafter's next F
    guesses."""
    bonus_after_all: tuple[Probability, ...] = (0.50, 0.64, 0.72, 0.78)
    """Entry F - 1: probability that the token behind a draft that stands as a whole, or behind none, is among
    the drafter's first F guesses."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("bonus_after_miss", "bonus_after_all"):
            hits = getattr(self, name)
            if list(hits) != sorted(hits):
                raise ValueError(f"{name}: more guesses cannot be right less often: write rising numbers")
        return self
