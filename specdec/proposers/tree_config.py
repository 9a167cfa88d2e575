"""The `speculative_config.tree` block: which trees a draft model drafts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from specdec.core.config import StrictConfig
from specdec.tree.dynamic import DynamicTree
from specdec.tree.entropy import EntropyTree
from specdec.tree.growth import TreeShape
from specdec.tree.static import StaticTree

_USUAL_ACCEPTANCE = (0.55, 0.16, 0.08, 0.05, 0.03, 0.02)
"""By rank, of draft models at moderate temperatures: what orders the nodes of `widths`."""

Rank = Annotated[int, Field(ge=0, le=63)]
Width = Annotated[int, Field(ge=1, le=64)]


class ChainConfig(StrictConfig):
    """One token behind the other."""

    shape: Literal["chain"] = "chain"
    """One token behind the other."""


class StaticTreeConfig(StrictConfig):
    """Always the same tree, given by `paths` or by `widths`."""

    shape: Literal["static"]
    """The same tree each time."""
    paths: tuple[tuple[Rank, ...], ...] = Field(default=(), max_length=64)
    """Its nodes, as Medusa's lists of choices: [0, 2] is the third likeliest child of the likeliest first
    token. In order of value: where fewer tokens are drafted, they are the first of these. Every path comes
    behind the path without its last step, and behind that to the next likelier sibling."""
    widths: tuple[Width, ...] = Field(default=(), max_length=64)
    """Children of each node, by depth: [4, 2, 1] has 4 first tokens, 2 behind each of them, one behind each
    of those. At most 64 nodes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.paths) == bool(self.widths):
            raise ValueError("shape: static needs either paths or widths")
        num_nodes, level = 0, 1
        for width in self.widths:
            level *= width
            num_nodes += level
            if num_nodes > 64:
                raise ValueError(f"widths: {list(self.widths)} make more than 64 nodes")
        try:
            self.make()
        except ValueError as error:
            raise ValueError(f"paths: {error}") from None
        return self

    def make(self) -> TreeShape:
        """Return the shape."""
        if self.paths:
            return StaticTree.of_paths(self.paths)
        return StaticTree.of_widths(self.widths, _USUAL_ACCEPTANCE)


class DynamicTreeConfig(StrictConfig):
    """A tree that grows where the draft model is confident (EAGLE-2)."""

    shape: Literal["dynamic"]
    """It grows where the draft model is surest (EAGLE-2)."""
    top_k: int = Field(default=4, ge=2, le=16)
    """Nodes that are looked behind at each depth, and children that are looked up behind each."""
    depth: int = Field(default=5, ge=1, le=16)
    """Longest path: also the forwards of the draft model for one tree."""

    def make(self) -> TreeShape:
        """Return the shape."""
        return DynamicTree(top_k=self.top_k, depth=self.depth)


class EntropyTreeConfig(StrictConfig):
    """A dynamic tree that is as wide as the draft model is unsure, and ends where there is no hope."""

    shape: Literal["entropy"]
    """It is wide where the draft model is unsure, narrow where it is sure, and ends early."""
    top_k: int = Field(default=4, ge=2, le=16)
    """Nodes that are looked behind at each depth, and most children of one."""
    depth: int = Field(default=8, ge=1, le=16)
    """Longest path: also most forwards of the draft model for one tree."""
    least_confidence: float = Field(default=0.1, gt=0.0, lt=1.0)
    """Nothing is drafted behind a path that is thought to stand with less than this."""

    def make(self) -> TreeShape:
        """Return the shape."""
        return EntropyTree(top_k=self.top_k, depth=self.depth, least_confidence=self.least_confidence)


TreeConfig = Annotated[
    ChainConfig | StaticTreeConfig | DynamicTreeConfig | EntropyTreeConfig, Field(discriminator="shape")
]


def tree_shape(config: TreeConfig) -> TreeShape | None:
    """Return the shape that is asked for; None for chains."""
    return None if isinstance(config, ChainConfig) else config.make()
