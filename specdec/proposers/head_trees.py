"""Heads that draft trees.

Each node is read by no model: what may follow is what the head of its depth says. Independent heads say the
same behind all nodes of one depth, so that their trees are parts of the Cartesian product of each head's best
tokens (Medusa, section 2.1.2); sequential heads are asked behind every path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specdec.drafters.base import SequentialHeads
from specdec.model.batch import NativeChooser
from specdec.proposers.compiled_drafters import CompiledHeads
from specdec.proposers.draft_loop import ChainStart
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.head_rows import HeadRows
from specdec.proposers.heads import HeadDraft, HeadLogits, HeadProposer, Heads
from specdec.proposers.tree_loop import Sprout, TreeDraftLoop
from specdec.sampling.sampler import Sampler
from specdec.tree.growth import TreeShape


class HeadNodes:
    """Implements `NodeReader`; the `states` of a start are its row."""

    def __init__(self, heads: Heads, compiled: CompiledHeads | None = None) -> None:
        self._heads = heads
        self._compiled = compiled
        self.vocab_size = heads.target.vocab_size
        self.sees_paths = isinstance(heads, SequentialHeads)
        self._logits: HeadLogits | None = None

    def read_prefixes(self, starts: Sequence[ChainStart]) -> torch.Tensor:
        return self._begin(starts).behind(range(len(starts)), [()] * len(starts))

    def read_nodes(self, sprouts: Sequence[Sprout]) -> torch.Tensor:
        assert self._logits is not None, "prefixes are read first"
        return self._logits.behind(
            [sprout.number for sprout in sprouts for _ in sprout.rows],
            [sprout.paths[node] for sprout in sprouts for node in sprout.rows],
        )

    def try_read_prefixes(self, starts: Sequence[ChainStart], chooser: NativeChooser) -> bool:
        if self._compiled is None or not self._compiled.is_ready:
            return False
        every, ends = range(len(starts)), [start.end for start in starts]
        chosen = self._begin(starts).try_choose(every, [()] * len(starts), chooser, every, ends)
        return chosen is not None

    def try_read_nodes(self, sprouts: Sequence[Sprout], chooser: NativeChooser) -> bool:
        assert self._logits is not None, "prefixes are read first"
        chosen = self._logits.try_choose(
            [sprout.number for sprout in sprouts for _ in sprout.rows],
            [sprout.paths[node] for sprout in sprouts for node in sprout.rows],
            chooser,
            [index for index, sprout in enumerate(sprouts) for _ in sprout.rows],
            [sprout.start.end + sprout.depths[node] for sprout in sprouts for node in sprout.rows],
        )
        return chosen is not None

    def _begin(self, starts: Sequence[ChainStart]) -> HeadLogits:
        rows = [start.states for start in starts if start.states is not None]
        last_token_ids = [start.token_ids[-1] for start in starts]
        self._logits = HeadLogits(self._heads, torch.cat(rows), last_token_ids, self._compiled)
        return self._logits


class TreeHeadProposer(HeadProposer):
    """Drafts trees of one shape, as far as there are heads. Children are chosen as by `TreeDraftProposer`."""

    def __init__(
        self,
        heads: Heads,
        rows: HeadRows,
        sampler: Sampler,
        *,
        shape: TreeShape,
        name: str,
        sampling: DraftSampling,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        compiled: CompiledHeads | None = None,
    ) -> None:
        """Draft trees of `shape`; for everything else see `HeadProposer`."""
        sampling = sampling.for_trees(shape)
        super().__init__(
            heads,
            rows,
            sampler,
            name=name,
            sampling=sampling,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            compiled=compiled,
        )
        self._shape = shape.within(heads.max_depth)
        self._loop = TreeDraftLoop(
            HeadNodes(heads, compiled), sampler, vocab_size, sampling, uses_confidence=shape.uses_confidence
        )
        self.capabilities = replace(self.capabilities, shape="tree", sampled=not sampling.is_deterministic)

    def _draft(self, drafts: Sequence[HeadDraft]) -> None:
        budgets = [min(draft.budget, self._shape.max_nodes) for draft in drafts]
        starts = [_start(draft, budget) for draft, budget in zip(drafts, budgets, strict=True)]
        growths = [self._shape.begin(budget) for budget in budgets]
        for draft, drafted in zip(drafts, self._loop.draft(starts, growths), strict=True):
            assert drafted is not None, "every draft has a budget"
            draft.token_ids = list(drafted.tree.token_ids)
            draft.parents = drafted.tree.parents
            draft.q_rows = list(drafted.q_rows or ())


def _start(draft: HeadDraft, budget: int) -> ChainStart:
    view = draft.view
    return ChainStart(
        token_ids=view.token_ids[-1:],
        start=view.committed_len - 1,
        block_table=(),
        budget=budget,
        params=draft.sampling.params,
        seed=draft.sampling.seed,
        shaper=draft.shaper,
        constraint=view.constraint,
        states=draft.row,
    )
