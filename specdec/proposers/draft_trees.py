"""A draft model that drafts trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdec.core.idle_work import IdleWork
from specdec.core.proposal import Proposal
from specdec.model.batch import GeneratingRunner, Runner
from specdec.proposers.branches import HeldBranch
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import EVERYTHING, Chunk, Drafting, DraftReading
from specdec.proposers.hidden import PrefixStates
from specdec.proposers.tree_loop import ReadNodes, RunnerNodes, TreeDraftLoop
from specdec.tree.growth import GrowingTree, TreeShape, levels_of


class TreeDraftProposer(DraftModelProposer):
    """Drafts trees of one shape, all sequences of a call together. It does not look ahead.

    Under sample_and_match children are ranked with the target's own noise. Rules that ask for q get draws
    without replacement, or the likeliest tokens, as `DraftSampling.for_trees` says.
    """

    def __init__(
        self,
        runner: Runner,
        choice: DraftChoice,
        shape: TreeShape,
        *,
        reading: DraftReading = EVERYTHING,
        idle_work: Sequence[IdleWork] = (),
        name: str = "draft_model",
        states: PrefixStates | None = None,
        generating: GeneratingRunner | None = None,
    ) -> None:
        """Draft trees of `shape`; for everything else see `DraftModelProposer`.

        `generating` is the runner where it may rank tokens itself.
        """
        sampling = choice.sampling.for_trees(shape)
        super().__init__(
            runner,
            replace(choice, sampling=sampling),
            reading=reading,
            idle_work=idle_work,
            name=name,
            states=states,
        )
        self._shape = shape
        self._loop = TreeDraftLoop(
            RunnerNodes(runner, generating),
            choice.sampler,
            choice.vocab_size,
            sampling,
            uses_confidence=shape.uses_confidence,
        )
        self.capabilities = replace(
            self.capabilities,
            shape="tree",
            tree_levels=levels_of(shape),
            sampled=not sampling.is_deterministic,
            looks_ahead=False,
        )

    def _num_read_behind(self, budget: int) -> int:
        return self._shape.num_looked_behind(min(budget, self._shape.max_nodes)) if budget > 0 else 0

    def _draft(self, chunks: Sequence[Chunk], branched: Sequence[tuple[Drafting, HeldBranch]] = ()) -> None:
        assert not branched, "trees are not drafted ahead"
        if not chunks:
            return
        starts = [self._start(chunk) for chunk in chunks]
        growths = [self._growth(chunk) for chunk in chunks]
        for chunk, drafted in zip(chunks, self._loop.draft(starts, growths), strict=True):
            drafting, read = chunk.drafting, ReadNodes()
            if drafted is not None:
                drafting.tree = drafted
                read = drafted.read if self._states is None else read
                drafting.token_ids = list(drafted.tree.token_ids)
            self._sequences.note_read(drafting, chunk.num_tokens, read.token_ids, read.parents)

    def _growth(self, chunk: Chunk) -> GrowingTree | None:
        """Begin the largest tree that is wanted and whose nodes have room, if there is any to begin."""
        budget = min(chunk.drafting.budget, self._shape.max_nodes) if chunk.completes else 0
        while budget > 1 and self._shape.num_looked_behind(budget) > chunk.drafting.room:
            budget -= 1
        return self._shape.begin(budget) if budget > 0 else None

    def _proposal(self, drafting: Drafting) -> Proposal:
        view, drafted = drafting.view, drafting.tree
        assert drafted is not None, "whoever has tokens has a tree"
        return Proposal(
            request_id=view.request_id,
            committed_len=view.committed_len,
            prefix_hash=view.prefix_hash,
            token_ids=drafted.tree.token_ids,
            parents=drafted.tree.parents,
            noise_stream=self._sampling.stream_of(view.params),
            q_rows=drafted.q_rows,
            method=self.capabilities.name,
        )
