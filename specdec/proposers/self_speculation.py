"""Self-speculation: the target drafts, with a part of its K/V, in the step that verifies."""

from __future__ import annotations

from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.none import NoProposer


class SelfSpeculation(NoProposer):
    """Stands for the target's own drafts where others propose: it says that there are such."""

    capabilities = ProposerCapabilities(name="self", sampled=True, kv="target", at_target=True)
