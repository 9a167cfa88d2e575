"""Self-speculation: the target, or a view of it, drafts on the target's K/V, in the step that verifies."""

from __future__ import annotations

from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.none import NoProposer
from specdec.tree.growth import TreeShape, levels_of


class SelfSpeculation(NoProposer):
    """Stands for the target's own drafts where others propose: it says that there are such."""

    def __init__(self, method: str = "self", tree: TreeShape | None = None) -> None:
        """`method` is what such drafts are called; `tree` the shape of their trees, None: they are chains."""
        self.capabilities = ProposerCapabilities(
            name=method,
            shape="chain" if tree is None else "tree",
            tree_levels=levels_of(tree),
            sampled=True,
            kv="target",
            at_target=True,
        )
