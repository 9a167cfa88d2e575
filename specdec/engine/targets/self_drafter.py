"""Self-speculation: the target drafts for itself, with its own weights and pages and a part of its K/V.

What is drafted is what the token function chooses, at the same noise, on logits of a forward that attends to
the selected blocks only. K/V of drafted tokens are written where those of the verification will be, and the
verification, which runs in the same step, overwrites them all, but for those that are bit for bit its own
(`model.resumed_forward`): nothing that is kept was computed from a selection. (MagicDec, Chen et al., arXiv
2408.11049; the block-table form is ours.)

Of a tree, nodes that have children are read, in an order of their own: never more of them than are
verified, so that they lie where rows of the verification will.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.kv.block_scores import BlockScores
from specdec.kv.packed_copy import PackedCopy
from specdec.kv.selection import KvSelection
from specdec.model.batch import GeneratingRunner
from specdec.proposers.draft_loop import ChainStart, FusedDraftLoop, NativeDraftLoop, StepwiseDraftLoop
from specdec.proposers.draft_sampling import SHARED_NOISE
from specdec.proposers.tree_loop import RunnerNodes, TreeDraftLoop
from specdec.sampling.sampler import TokenChooser
from specdec.tree.growth import TreeShape
from specdec.tree.topology import topology_of


class SelfDraft(NamedTuple):
    """Draft tokens behind one work."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    """As `Proposal.parents`."""


class SelfDrafter:
    """Drafts behind committed tokens through selected block tables."""

    def __init__(
        self,
        runner: GeneratingRunner,
        sampler: TokenChooser,
        selection: KvSelection,
        shape: TreeShape | None = None,
        packed: PackedCopy | None = None,
        fused_loop: FusedDraftLoop | None = None,
    ) -> None:
        """Draft with the target's own `runner` and `sampler`, trees of `shape` where there is one.

        With `packed`, `runner` attends to this copy of the target's K/V. `fused_loop` drafts what it can on
        the same runner (None: one for CPUs).
        """
        self._selection = selection
        self._block_size = runner.block_size
        self._packed = packed
        self._shape = None if shape is None else shape.frugal()
        self._fused = fused_loop or NativeDraftLoop(runner, sampler, runner.vocab_size)
        self._stepwise = StepwiseDraftLoop(runner, sampler, runner.vocab_size)
        self._trees = TreeDraftLoop(
            RunnerNodes(runner, runner),
            sampler,
            runner.vocab_size,
            SHARED_NOISE,
            uses_confidence=shape is not None and shape.uses_confidence,
        )

    def draft(
        self, starts: Sequence[ChainStart], scores: Sequence[BlockScores | None], budgets: Sequence[int]
    ) -> list[SelfDraft]:
        """Return what is drafted behind each start, given as for a draft that attends to everything.

        `scores` are those of the sequences, as the selection has made them; `budgets` tokens that they may
        attend to, 0: as configured.
        """
        selected = [self._select(*one) for one in zip(starts, scores, budgets, strict=True)]
        if self._shape is not None:
            return self._draft_trees(selected, self._shape)
        chains = self._fused.try_draft(selected)
        chains = self._stepwise.draft(selected) if chains is None else chains
        return [SelfDraft(tuple(chain)) for chain in chains]

    def catch_up(self, starts: Sequence[ChainStart], num_copied: Sequence[int]) -> None:
        """Copy what has been verified, where drafts attend to a copy.

        `num_copied` tokens of each sequence are copied already. Whatever is before a start has been verified;
        what is behind it is a draft's, and is written again.
        """
        if self._packed is None:
            return
        size = self._block_size
        slots: list[int] = []
        for start, first in zip(starts, num_copied, strict=True):
            table = start.block_table
            slots += [table[place // size] * size + place % size for place in range(first, start.start)]
        self._packed.copy(slots)

    def _draft_trees(self, starts: Sequence[ChainStart], shape: TreeShape) -> list[SelfDraft]:
        growths = [shape.begin(min(start.budget, shape.max_nodes)) for start in starts]
        drafts: list[SelfDraft] = []
        for drafted in self._trees.draft(starts, growths):
            assert drafted is not None, "every start has a budget"
            token_ids, parents, _ = drafted.tree
            is_chain = topology_of(len(token_ids), parents).is_chain
            drafts.append(SelfDraft(token_ids, None if is_chain else parents))
        return drafts

    def _select(self, start: ChainStart, scores: BlockScores | None, budget: int) -> ChainStart:
        selection = self._selection.select(start.start, scores, budget)
        if selection.num_dropped == 0:
            return start
        return start._replace(
            block_table=selection.table(start.block_table), num_dropped=selection.num_dropped
        )
