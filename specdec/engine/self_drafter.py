"""Self-speculation: the target drafts for itself, with its own weights and pages and a part of its K/V.

What is drafted is what the token function chooses, at the same noise, on logits of a forward that attends to
the selected blocks only. K/V of drafted tokens are written where those of the verification will be, and the
verification, which runs in the same step, overwrites them all: nothing that is kept was computed from a
selection. (MagicDec, Chen et al., arXiv 2408.11049; the block-table form is ours.)
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.kv.block_scores import BlockScores
from specdec.kv.selection import KvSelection
from specdec.model.batch import GeneratingRunner
from specdec.proposers.draft_loop import ChainStart, NativeDraftLoop, StepwiseDraftLoop
from specdec.sampling.sampler import TokenChooser


class SelfDrafter:
    """Drafts behind committed tokens through selected block tables."""

    def __init__(self, runner: GeneratingRunner, sampler: TokenChooser, selection: KvSelection) -> None:
        """Draft with the target's own `runner` and `sampler`."""
        self._selection = selection
        self._fused = NativeDraftLoop(runner, sampler, runner.vocab_size)
        self._stepwise = StepwiseDraftLoop(runner, sampler, runner.vocab_size)

    def draft(
        self, starts: Sequence[ChainStart], scores: Sequence[BlockScores | None], budgets: Sequence[int]
    ) -> list[list[int]]:
        """Return the chain of each start, given as for a draft that attends to everything.

        `scores` are those of the sequences, as the selection has made them; `budgets` tokens that they may
        attend to, 0: as configured.
        """
        selected = [self._select(*one) for one in zip(starts, scores, budgets, strict=True)]
        chains = self._fused.try_draft(selected)
        return self._stepwise.draft(selected) if chains is None else chains

    def _select(self, start: ChainStart, scores: BlockScores | None, budget: int) -> ChainStart:
        selection = self._selection.select(start.start, scores, budget)
        if selection.num_dropped == 0:
            return start
        return start._replace(
            block_table=selection.table(start.block_table), num_dropped=selection.num_dropped
        )
