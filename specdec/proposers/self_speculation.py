"""Self-speculation: the target, or a view of it, drafts on the target's K/V, in the step that verifies."""

from __future__ import annotations

from typing import Literal

from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.none import NoProposer


class SelfSpeculation(NoProposer):
    """Stands for the target's own drafts where others propose: it says that there are such."""

    def __init__(self, method: str = "self", shape: Literal["chain", "tree"] = "chain") -> None:
        """`method` is what such drafts are called."""
        self.capabilities = ProposerCapabilities(
            name=method, shape=shape, sampled=True, kv="target", at_target=True
        )
