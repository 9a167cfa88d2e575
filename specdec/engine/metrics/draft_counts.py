"""What has become of drafts, counted by who made them and by what they were for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from specdec.core.request import OTHER_CLASS, Request
from specdec.core.series import as_label
from specdec.scheduling.speculation.acceptance import MAX_CLASSES

_TEMPERATURES = (0.0, 0.5, 1.0)
_TEMPERATURE_BANDS = ("0", "to 0.5", "to 1", "above 1")
_TOP_PS = (0.9, 1.0)
_TOP_P_BANDS = ("below 0.9", "below 1", "1")
_GENERATED = (32, 256)
_PHASES = ("first 32", "to 256", "later")
"""How far the text had come, in generated tokens: what stands in the prompt is drafted from most easily at
first, what the text itself repeats later on."""


@dataclass(slots=True)
class MethodCounts:
    """Proposals by one method."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Count one proposal that something has become of."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted

    def add(self, other: MethodCounts) -> None:
        """Count what another has counted, too."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens


@dataclass(slots=True)
class DrafterCounts(MethodCounts):
    """Proposals by one of several drafters, or of one that is not heard."""

    num_requests: int = 0
    """Requests that it has drafted for; one that changed its drafter counts for each."""
    draft_s: float = 0.0
    """What it took."""

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens of a round with a proposal: the accepted ones and one more; None: there was none."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    def series(self, prefix: str, labels: str) -> Mapping[str, float]:
        """Return all values by name, `prefix` before and `labels` behind it."""
        return {
            f"{prefix}_num_drafts{labels}": self.num_drafts,
            f"{prefix}_num_draft_tokens{labels}": self.num_draft_tokens,
            f"{prefix}_num_accepted_tokens{labels}": self.num_accepted_tokens,
            f"{prefix}_num_requests{labels}": self.num_requests,
            f"{prefix}_time_seconds{labels}": self.draft_s,
        }


class DraftKind(NamedTuple):
    """What a draft was for. The names of the fields are those under which it is exported."""

    request_class: str
    temperature: str
    """A band, as the two below."""
    top_p: str
    phase: str

    @classmethod
    def of(cls, request: Request, num_generated: int) -> DraftKind:
        """Return the kind of a draft behind so many generated tokens."""
        params = request.params
        return cls(
            request.class_name,
            _TEMPERATURE_BANDS[bisect_left(_TEMPERATURES, params.temperature)],
            _TOP_P_BANDS[bisect_right(_TOP_PS, params.top_p)],
            _PHASES[bisect_right(_GENERATED, num_generated)],
        )


class DraftsByKind:
    """Counts of verified proposals by what they were for.

    There are at most `MAX_CLASSES` classes: those that come later count as `OTHER_CLASS`.
    """

    def __init__(self) -> None:
        self._counts: dict[DraftKind, MethodCounts] = {}
        self._classes = {OTHER_CLASS}

    def count(self, kind: DraftKind, num_drafted: int, num_accepted: int) -> None:
        """Count one proposal that something has become of."""
        counts = self._counts.get(kind)
        if counts is None:
            if kind.request_class not in self._classes:
                if len(self._classes) >= MAX_CLASSES:
                    self.count(kind._replace(request_class=OTHER_CLASS), num_drafted, num_accepted)
                    return
                self._classes.add(kind.request_class)
            counts = self._counts[kind] = MethodCounts()
        counts.count(num_drafted, num_accepted)

    def series(self) -> Mapping[str, float]:
        """Return all values by name: for each property of a draft, counts by its values (any thread)."""
        sums: dict[tuple[str, str], MethodCounts] = {}
        for kind, counts in dict(self._counts).items():
            for name, value in zip(DraftKind._fields, kind, strict=True):
                sums.setdefault((name, value), MethodCounts()).add(counts)
        return {
            f'spec_decode_{what}_by_{name}{{{name}="{as_label(value)}"}}': number
            for (name, value), total in sums.items()
            for what, number in (
                ("num_drafts", total.num_drafts),
                ("num_draft_tokens", total.num_draft_tokens),
                ("num_accepted_tokens", total.num_accepted_tokens),
            )
        }
