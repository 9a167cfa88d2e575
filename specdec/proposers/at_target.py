"""Where proposers are asked: says that one drafts at the target, which needs not be asked."""

from __future__ import annotations

from dataclasses import replace

from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.none import NoProposer


class DraftsAtTarget(NoProposer):
    """Stands for a proposer in the target's process (`engine.target_drafting`)."""

    def __init__(self, capabilities: ProposerCapabilities) -> None:
        """`capabilities` of that proposer."""
        self.capabilities = replace(capabilities, at_target=True)
