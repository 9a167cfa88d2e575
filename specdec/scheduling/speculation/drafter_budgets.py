"""Which KV budget each request has for the one of several drafters that attends to a part of a text.

A request has one whichever drafter it has at the moment: what that drafter would attend to, were it asked.
What is picked is decided with the drafter (`DrafterPicks`); here it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from specdec.core.ids import RequestId
from specdec.kv.selection import KvBudget
from specdec.scheduling.speculation.picks import remember, without_gone
from specdec.scheduling.state import Schedulable

TRIED_SHARE = 16
"""One in so many requests tries what least is known of, in a trial, or of new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetedDrafter:
    """The one of several drafters that attends to a part of a text."""

    place: int
    """Among them."""
    budgets: Sequence[KvBudget] = ()
    """What there is to choose from, the first where nothing is known. With fewer than two nobody chooses."""
    is_kept: bool = False
    """Whether a request keeps its first one: what a smaller one leaves out is lost."""


class DrafterBudgets:
    """What requests without a budget of their own have of the budgets of one drafter, by their places."""

    def __init__(self, drafter: BudgetedDrafter) -> None:
        """Give each the first, until told what is best for its class."""
        self._options = tuple(drafter.budgets)
        self.is_kept = drafter.is_kept
        """Whether requests keep what they have."""
        self._picks: dict[RequestId, int] = {}
        self._best_of_class: dict[str, int] = {}
        self._least_known_of_class: dict[str, int] = {}
        self._num_new = 0

    @property
    def places(self) -> range:
        """Of the budgets."""
        return range(len(self._options))

    def of(self, request_id: RequestId, class_name: str) -> int:
        """Return what a request has. New ones begin as is best for their class.

        Where they keep that, one in `TRIED_SHARE` begins with what least is known of.
        """
        pick = self._picks.get(request_id)
        if pick is None:
            begin_with = self._best_of_class
            self._num_new += 1
            if self.is_kept and self._num_new % TRIED_SHARE == TRIED_SHARE // 2:
                begin_with = self._least_known_of_class
            pick = begin_with.get(class_name, 0)
            remember(self._picks, request_id, pick)
        return pick

    def budget(self, request_id: RequestId, class_name: str) -> KvBudget:
        """Return the same as a budget."""
        return self._options[self.of(request_id, class_name)]

    def attended(self, one: Schedulable, place: int) -> int:
        """Return how many committed tokens drafts of a request attend to, by a budget."""
        return min(one.committed_len, self._options[place].tokens(one.committed_len))

    def give(self, request_id: RequestId, place: int) -> None:
        """Let a request have a budget from now on."""
        self._picks[request_id] = place

    def note_class(self, class_name: str, *, best: int, least_known: int) -> None:
        """Note what requests of a class begin with from now on."""
        self._best_of_class[class_name], self._least_known_of_class[class_name] = best, least_known

    def forget_gone(self, present: Set[RequestId]) -> None:
        """Forget what others have, once they are many."""
        self._picks = without_gone(self._picks, present)
