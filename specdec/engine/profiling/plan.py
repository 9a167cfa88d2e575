"""What a start measures, and within which time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specdec.core.clock import Clock
from specdec.kv.selection import TokenBudget

SHORT_CONTEXT = 32
LONG_CONTEXT = 512
_LONGEST_CONTEXT = 4096
"""Long enough for any budget."""
NUM_LONG = 4
"""Sequences with a long context."""
NUM_REPEATS = 5
_FIRST_TOKEN, _NUM_TOKENS = 3, 61
"""Ids that sequences are made of: small ones, which every draft model has too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """What to measure, and how long that may take."""

    key: str
    """See `cost_profile.profile_key`."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft_tokens: int
    budget_s: float
    kv_budget: TokenBudget | None = None
    """What drafts attend to, the most of several; None: everything."""
    budgeted_drafter: int = 0
    """Whose budget that is, of several drafters; the others attend to everything."""

    def of_drafter(self, place: int) -> ProfilePlan:
        """Return the plan for one of several drafters."""
        return self if place == self.budgeted_drafter else replace(self, kv_budget=None)

    @property
    def long_context(self) -> int:
        """Tokens of sequences with a long context: beyond what drafts attend to."""
        if self.kv_budget is None:
            return LONG_CONTEXT
        return min(max(LONG_CONTEXT, 2 * self.kv_budget.smallest), _LONGEST_CONTEXT)

    def attended(self, context: int) -> int:
        """Return how many tokens a draft behind so many attends to."""
        return context if self.kv_budget is None else min(context, self.kv_budget.tokens(context))


@dataclass(slots=True)
class Deadline:
    """How much of the time is left."""

    clock: Clock
    end_s: float

    @property
    def left_s(self) -> float:
        """Seconds; none or less where it is over."""
        return self.end_s - self.clock.now_s()


def random_tokens(generator: np.random.Generator, num_tokens: int, vocab_size: int) -> list[int]:
    """Return tokens of which made-up sequences are made."""
    end = min(_FIRST_TOKEN + _NUM_TOKENS, vocab_size)
    tokens: list[int] = generator.integers(min(_FIRST_TOKEN, end - 1), end, num_tokens).tolist()
    return tokens


def middle(values: Sequence[float]) -> float:
    """Return a median, one of the values."""
    return sorted(values)[len(values) // 2]
