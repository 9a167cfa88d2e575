"""Counts what is looked up, and what is drafted at the target for whoever a lookup has nothing for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from specdec.engine.rounds.drafting import Drafting
from specdec.proposers.lookup_first import LookupFirst


@dataclass(slots=True)
class LookupWatch:
    """By proposal: tokens."""

    looked_up: list[int] = field(default_factory=list)
    at_target: list[int] = field(default_factory=list)
    accepted_at_target: list[int] = field(default_factory=list)

    def begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Watch every engine from here on."""
        propose, count = LookupFirst.propose, Drafting.count

        def watched(proposer: LookupFirst, *arguments: Any) -> Any:
            proposals = propose(proposer, *arguments)
            assert all(one.is_fallback for one in proposals.values())
            self.looked_up.extend(len(one.token_ids) for one in proposals.values())
            return proposals

        def counted(drafting: Drafting, live: Any, drafter: Any, num_drafted: int, num_accepted: int) -> None:
            self.at_target.append(num_drafted)
            self.accepted_at_target.append(num_accepted)
            count(drafting, live, drafter, num_drafted, num_accepted)

        monkeypatch.setattr(LookupFirst, "propose", watched)
        monkeypatch.setattr(Drafting, "count", counted)
