"""The `speculative_config.tree` block: which trees a draft model drafts."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from specdec.core.config import StrictConfig
from specdec.core.proposal import MAX_DRAFT_TOKENS
from specdec.tree.dynamic import DynamicTree
from specdec.tree.entropy import EntropyTree
from specdec.tree.growth import TreeShape
from specdec.tree.static import StaticTree, best_tree

_USUAL_NODES, _USUAL_DEPTH = 16, 8
_USUAL_ACCEPTANCE = (0.55, 0.16, 0.08, 0.05, 0.03, 0.02)
"""By rank, of draft models at moderate temperatures: what orders the nodes of `widths`."""

Rank = Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS - 1)]
Width = Annotated[int, Field(ge=1, le=MAX_DRAFT_TOKENS)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
ByRank = Annotated[tuple[Share, ...], Field(max_length=16)]
ByDepth = Annotated[tuple[ByRank, ...], Field(max_length=16)]


class ChainConfig(StrictConfig):
    """One token behind the other."""

    shape: Literal["chain"] = "chain"
    """One token behind the other."""


class StaticTreeConfig(StrictConfig):
    """Always the same tree, given by `paths`, by `widths`, or by what `acceptance` was measured."""

    shape: Literal["static"]
    """The same tree each time."""
    paths: tuple[tuple[Rank, ...], ...] = Field(default=(), max_length=MAX_DRAFT_TOKENS)
    """Its nodes, as Medusa's lists of choices: [0, 2] is the third likeliest child of the likeliest first
    token. In order of value: where fewer tokens are drafted, they are the first of these. Every path comes
    behind the path without its last step, and behind that to the next likelier sibling."""
    widths: tuple[Width, ...] = Field(default=(), max_length=MAX_DRAFT_TOKENS)
    """Children of each node, by depth: [4, 2, 1] has 4 first tokens, 2 behind each of them, one behind each
    of those. At most 64 nodes."""
    acceptance: ByRank | ByDepth = ()
    """How often the likeliest child of a node stands where the node does, the second likeliest, and so on:
    the tree is the one of `num_nodes` from which most tokens are expected (Sequoia). A list of such lists:
    one for each depth, that of first tokens first, as they are measured of heads; nothing lies deeper."""
    num_nodes: int | None = Field(default=None, ge=1, le=MAX_DRAFT_TOKENS)
    """Nodes of the tree that `acceptance` asks for; null: 16."""
    max_depth: int | None = Field(default=None, ge=1, le=16)
    """Longest path of that tree: also the forwards of a draft model for it; null: 8."""

    @model_validator(mode="before")
    @classmethod
    def _check_acceptance(cls, data: Any) -> Any:
        # Before pydantic, which would say of a union what is wrong with a value by either of its forms.
        given = data.get("acceptance") if isinstance(data, dict) else None
        if not isinstance(given, list | tuple):
            return data
        if not any(isinstance(one, list | tuple) for one in given):
            _check_shares("acceptance", given)
            return data
        for depth, shares in enumerate(given):
            _check_shares(f"acceptance[{depth}]", shares)
            if len(shares) == 0:
                raise ValueError(f"acceptance[{depth}]: is empty: leave it out, with all behind it")
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if [bool(self.paths), bool(self.widths), bool(self.acceptance)].count(True) != 1:
            raise ValueError("shape: static needs one of paths, widths and acceptance")
        if not self.acceptance:
            for name in ("num_nodes", "max_depth"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name}: it goes with acceptance; paths and widths say it themselves")
        num_lists = sum(isinstance(one, tuple) for one in self.acceptance)
        if self.max_depth is not None and 0 < num_lists < self.max_depth:
            raise ValueError(
                f"max_depth: {self.max_depth} is more than acceptance has lists, one for each depth: write "
                f"{num_lists} at most, or leave it out"
            )
        num_nodes, level = 0, 1
        for width in self.widths:
            level *= width
            num_nodes += level
            if num_nodes > MAX_DRAFT_TOKENS:
                raise ValueError(f"widths: {list(self.widths)} make more than {MAX_DRAFT_TOKENS} nodes")
        try:
            shape = self.make()
        except ValueError as error:
            raise ValueError(f"paths: {error}") from None
        if shape.max_nodes == 0:
            raise ValueError("acceptance: no child ever stands: there is nothing to draft")
        return self

    def make(self) -> TreeShape:
        """Return the shape."""
        if self.paths:
            return StaticTree.of_paths(self.paths)
        if self.acceptance:
            return _best_tree(self.acceptance, self.num_nodes or _USUAL_NODES, self.max_depth or _USUAL_DEPTH)
        return StaticTree.of_widths(self.widths, _USUAL_ACCEPTANCE)


@lru_cache(maxsize=16)
def _best_tree(acceptance: ByRank | ByDepth, num_nodes: int, max_depth: int) -> StaticTree:
    """As `best_tree`, made once: a configuration is checked and read several times."""
    return best_tree(acceptance, num_nodes, max_depth)


def _check_shares(name: str, given: Any) -> None:
    """Check what is to say how often the children of a node stand, by rank.

    Raises:
        ValueError: it says no such thing.
    """
    try:
        shares = [float(share) for share in given]
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}: must be shares from 0 to 1, one for each rank, or such a list for each depth; got "
            f"{given!r}"
        ) from None
    if not all(0.0 <= share <= 1.0 for share in shares):
        raise ValueError(f"{name}: shares are from 0 to 1, got {given!r}")
    if sum(shares) > 1.0 + 1e-6:
        raise ValueError(
            f"{name}: at most one child of a node stands, so these sum to 1 at most, not to {sum(shares):g}"
        )


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
