"""What a goodput controller may do."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.kv.selection import KvBudget
from specdec.scheduling.speculation.modes import OverlapMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Bounds and habits of a `GoodputController`. Rounds are counted, seconds are those of observations."""

    max_draft_tokens: int
    """Largest k."""
    modes: tuple[OverlapMode, ...] = ("lockstep",)
    """Modes that may be chosen."""
    is_target_elsewhere: bool = False
    """Whether the target's steps run while this process does other things (`Target.is_elsewhere`)."""
    num_rows_beside: int = 0
    """Rows that drafting for a sequence adds to a round, whatever k."""
    max_branches: int = 4
    """draft_ahead: most continuations per request."""
    caps_by_batch: tuple[tuple[int, int, int], ...] = ()
    """(lo, hi, k): with lo to hi sequences, both included, k is at most that. The first that holds counts."""
    max_rows: int = 512
    """Most rows of a round."""
    max_sequences: int = 64
    """Most sequences of a round."""
    margin: float = 0.02
    """How much better an option must be than what is done now, as a share."""
    dwell_rounds: int = 16
    """Rounds between two switches, unless the batch changes by a factor of 1.5 or more."""
    decide_every: int = 8
    """Rounds after which a decision is thought over, where the batch stays the same."""
    trial_share: float = 0.004
    """Share of the time that trying what is thought worse may lose; audits may lose half as much beside that,
    and comparisons of modes as much as audits (`Trials`)."""

    drafter_caps: tuple[int, ...] = ()
    """Largest k of each of several drafters, of which one is picked for each request; empty: there is one."""
    budgeted_drafter: int | None = None
    """Which drafter attends to a part of a text alone (`Schedulable.draft_context`); None: none does."""
    tree_levels: tuple[tuple[int, ...], ...] = ()
    """By drafter, of one that is alone too: how many levels trees of 1, 2, ... nodes have
    (`ProposerCapabilities.tree_levels`)."""

    looks_first: bool = False
    """Whether lookups go before the drafter (`ProposerCapabilities.looks_first`): for whom something was
    found, the drafter was not asked, and owes nothing."""
    kv_budgets: tuple[KvBudget, ...] = ()
    """What drafts of a request may attend to, by that drafter where there are several; of several budgets,
    one is picked for each request."""
    keeps_kv_budgets: bool = False
    """Whether a request keeps what was picked for it first: what a smaller budget leaves out is lost."""

    def cap_for(self, num_sequences: int) -> int:
        """Return the largest k with so many sequences."""
        for low, high, cap in self.caps_by_batch:
            if low <= num_sequences <= high:
                return min(cap, self.max_draft_tokens)
        return self.max_draft_tokens
