"""What became of drafts between two moments of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

from specdec.engine.metrics.engine_metrics import EngineMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """Counters of an engine's drafts. Differences and sums are such counters too."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted: tuple[int, ...] = ()
    """[i]: drafts of which token i stood; of a tree, one at depth i."""
    draft_s: float = 0.0
    """Making them."""
    verify_s: float = 0.0
    """Steps of the target, the choice of tokens included."""
    coordinator_s: float = 0.0
    """All else of the rounds."""

    @classmethod
    def of(cls, metrics: EngineMetrics) -> Self:
        """Return what was counted up to now."""
        return cls(
            num_drafts=metrics.num_drafts,
            num_draft_tokens=metrics.num_draft_tokens,
            accepted=tuple(metrics.num_accepted_tokens_per_pos),
            draft_s=metrics.draft_s,
            verify_s=metrics.verify_s,
            coordinator_s=metrics.coordinator_s,
        )

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return self._with(other, 1)

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        return self._with(other, -1)

    def _with(self, other: DraftCounts, sign: int) -> DraftCounts:
        return DraftCounts(
            num_drafts=self.num_drafts + sign * other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + sign * other.num_draft_tokens,
            accepted=tuple(a + sign * b for a, b in zip_longest(self.accepted, other.accepted, fillvalue=0)),
            draft_s=self.draft_s + sign * other.draft_s,
            verify_s=self.verify_s + sign * other.verify_s,
            coordinator_s=self.coordinator_s + sign * other.coordinator_s,
        )
