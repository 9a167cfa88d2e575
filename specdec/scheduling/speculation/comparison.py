"""The kinds of rounds that a batch may have, beside one another: what each should bring, and has brought."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from specdec.scheduling.speculation.explanation import Reason
from specdec.scheduling.speculation.goodput import Kind, Option
from specdec.scheduling.speculation.trials import ABOUT_AS_GOOD

_LEAST_PROBED, _MOST_PROBED = 4, 16
"""Requests that a probe drafts for, in one round, where it only asks for verdicts: a quarter of them, within
these."""
_NEARLY_AS_GOOD = 0.15
"""What a mode is thought to be worse by, as a share, for a few rounds of it not to be enough: those of one
kind differ by a tenth, and what steps take beside one another is often expected wrongly by as much."""


def num_probed(num_sequences: int) -> int:
    """Return for how many of so many sequences a probe drafts that only asks for verdicts."""
    return min(max(_LEAST_PROBED, min(num_sequences // 4, _MOST_PROBED)), num_sequences)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The options of one decision, of which one kind is what is done but for trials."""

    options: Mapping[Kind, Option]
    """The best of each kind, by the model; plain is always there."""
    rates: Mapping[Kind, float]
    """Tokens per second of each, measured rounds taken into account."""
    kind: Kind
    """What is done but for trials. It may not be there for this batch."""
    margin: float
    """How much better something has to be to count as better, as a share."""
    little_known: Set[Kind] = frozenset()
    """Kinds of which few rounds have been seen, if any, or long ago."""
    last_compared: Mapping[Kind, int] = field(default_factory=dict)
    """In which round kinds were run beside the one that is done, if they ever were."""
    just_compared: Set[Kind] = frozenset()
    """Those of them that were not long ago."""
    has_choice: bool = True
    """Whether there is anybody without a k of its own."""
    beyond_targets: Option | None = None
    """Where latency targets leave nothing but plain: what they would leave if costs were those measured at
    the start, at the present price. None: nothing, or it is not time to ask."""

    @property
    def plain(self) -> Option:
        """Rounds without drafts."""
        return self.options["plain"]

    @property
    def usual(self) -> Option:
        """What is done but for trials."""
        return self.options.get(self.kind, self.plain)

    @property
    def usual_rate(self) -> float:
        """Tokens per second of that."""
        return self.rates[self.usual.kind]

    @property
    def is_as_asked(self) -> bool:
        """Whether there are drafts, and none but those that requests ask for."""
        asked = self.plain.num_draft_tokens
        return bool(asked.any()) and np.array_equal(self.usual.num_draft_tokens, asked)

    @property
    def reason(self) -> Reason:
        """Why that is done."""
        if self.is_as_asked:
            return "requested"
        if self.usual.kind != "plain":
            return "gain"
        best = max((option.rate for kind, option in self.options.items() if kind != "plain"), default=0.0)
        return "measured_slower" if best > self.usual.rate * (1.0 + self.margin) else "no_gain"

    @property
    def is_bounded_by_targets(self) -> bool:
        """Whether something would be better than what is done, did it not break a latency target."""
        enough = self.usual.rate * (1.0 + self.margin)
        return self.usual.unbounded_rate is not None or any(
            (option.unbounded_rate or 0.0) > enough for option in self.options.values()
        )

    def is_nearly_as_good(self, option: Option) -> bool:
        """Whether another way to draft is thought to be nearly as good as that which is done."""
        is_on = self.usual.kind != "plain"
        return is_on and self.rates[option.kind] >= self.usual_rate * (1.0 - _NEARLY_AS_GOOD)

    def is_better(self, option: Option) -> bool:
        """Whether another way to draft is thought to be better than that which is done."""
        is_on = self.usual.kind != "plain"
        return is_on and self.rates[option.kind] > self.usual_rate * (1.0 + self.margin)

    def other_mode(self) -> Option | None:
        """Return the other mode to look at next; None: there is none.

        That is the best one that is thought to be better; or one of which little is known; or of those that
        are nearly as good the one that was not looked at for longest, for that may change, and what is known
        is never that exact. While speculation is off there is one where another mode has been left for that:
        what is known of one says little of the others.
        """
        others = [option for kind, option in self.options.items() if kind not in ("plain", self.kind)]
        unknown = [option for option in others if option.kind in self.little_known]
        if self.usual.kind == "plain" and (self.kind != "plain" or len(unknown) == len(others)):
            return None
        best_first = sorted(others, key=lambda option: -self.rates[option.kind])
        for option in best_first:
            if self.is_better(option):
                return option
        for option in best_first:
            if option.kind in self.little_known:
                return option
        as_good = filter(self.is_nearly_as_good, best_first)
        return min(as_good, key=lambda option: self.last_compared.get(option.kind, -1), default=None)

    @cached_property
    def in_doubt(self) -> tuple[Option | None, bool]:
        """What a probe does, and whether it only asks for verdicts; None: there is nothing to look at.

        That is what should be better than what is done, but was measured not to be, and not just now beside
        it. While speculation is off
        it may also be what is about as good, for what that takes is as much in doubt as what is accepted,
        where there are more requests than a probe drafts for that only asks for verdicts; or else lockstep,
        which tells most of acceptance in few rounds. Not where everybody has a k of its own, for then there
        is nothing more to draft. Where latency targets leave no drafts, it is what they would leave if what
        drafts were learnt to cost were over.
        """
        if self.beyond_targets is not None:
            return self.beyond_targets, True
        others = [option for kind, option in self.options.items() if kind not in ("plain", self.kind)]
        best = max(others, key=lambda option: option.rate, default=None)
        is_off = self.kind == "plain" and self.has_choice
        if best is not None and best.rate > self.usual_rate * (1.0 + self.margin):
            return (None, False) if best.kind in self.just_compared else (best, False)
        if best is not None and is_off and best.rate > self.usual_rate * (1.0 - ABOUT_AS_GOOD):
            drafts_more = best.num_draft_tokens > self.plain.num_draft_tokens
            if drafts_more.any() and num_probed(len(drafts_more)) < len(drafts_more):
                return best, False
        return (self.options.get("lockstep", best), True) if is_off else (None, False)
