"""A drafter with a lookup that goes before it, where it has something long to go by.

Behind a long match what followed is likely to follow again, and a lookup costs next to nothing: inside a
quotation the draft model, heads or the target need not draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.fallback import FallbackProposer


class LookupFirst(FallbackProposer):
    """What `fallback` proposes, and for whoever gets nothing what `primary` does.

    Otherwise as its base: proposals of the lookup say that they tell nothing of the primary, which sees those
    sequences without a budget, so that it reads on. Where the primary drafts at the target, the target is
    asked for whoever gets nothing.
    """

    @property
    def capabilities(self) -> ProposerCapabilities:
        """The primary's, and that it is not asked for everybody."""
        return replace(super().capabilities, looks_first=True)

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """Look everybody up; ask the primary for whoever is left without; see the contract."""
        found = self._fallback.propose(sequences, num_draft_tokens)
        left = {one: budget for one, budget in num_draft_tokens.items() if one not in found}
        proposals = self._primary.propose(sequences, left)
        return proposals | {one: msgspec.structs.replace(its, is_fallback=True) for one, its in found.items()}
