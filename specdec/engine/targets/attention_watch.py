"""What committed tokens attend to, asked of the target's forwards, for the selections that go by it.

Which draft tokens stand is known only after the forward, so all rows are observed, each by itself, and those
of rejected drafts are left out afterwards: a token that is not part of the text must not say what matters to
it. Of a tree those on the path that stands are left; what they attend to in each other counts where it lay
then, at the very end, which is selected anyway.

One observed sequence makes the whole step an observed one, which on a GPU is run without its recorded graph:
so those whose turn it soon is are looked at along with it, and sequences of a batch come to have it together.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.attention.observation import Observation
from specdec.core.plan import TargetWork, WorkResult
from specdec.engine.targets.work_rows import node_parents, num_drafted
from specdec.kv.block_scores import BlockScores
from specdec.kv.block_table import num_blocks_for
from specdec.model.runner import ModelRunner
from specdec.verification.answers import verdict_of


class AttentionWatch:
    """Observes a runner's forwards and tells the scores of sequences what there was to see.

    Where ranks hold the model, each sees its own heads. Sums over all of them are the same bits on every
    rank, and so are the scores, as they must be for ranks that draft together.
    """

    def __init__(self, runner: ModelRunner) -> None:
        """Watch forwards of `runner`, which has all layers."""
        loaded = runner.loaded
        self._layers = loaded.layers
        self._device = loaded.device
        self._block_size = runner.block_size
        self._ranks = None if loaded.grid is None else loaded.grid.tensor

    def ask(self, works: Sequence[TargetWork], scores: Sequence[BlockScores | None]) -> Observation | None:
        """Return what to observe in the forward of `works`, of sequences with `scores`; None: nothing.

        Where there are no scores, nobody looks.
        """
        num_observed = rows_to_observe(works, scores)
        if not any(num_observed):
            return None
        return Observation.of(
            num_observed,
            query_lens=[len(work.token_ids) for work in works],
            num_blocks=max(num_blocks_for(_end(work), self._block_size) for work in works),
            layers=self._layers,
            device=self._device,
        )

    def learn(
        self,
        observation: Observation,
        works: Sequence[TargetWork],
        results: Sequence[WorkResult],
        scores: Sequence[BlockScores | None],
    ) -> None:
        """Tell the scores what was seen, once it is known which draft tokens stand.

        Raises:
            TransportError: another rank is gone.
        """
        by_row = observation.by_row()
        if self._ranks is not None:
            by_row = self._ranks.sum_(by_row)
        masses = by_row.cpu().numpy()
        first = 0
        for count, work, result, of_sequence in zip(
            observation.num_observed, works, results, scores, strict=True
        ):
            if count and result.token_ids:
                assert of_sequence is not None
                standing = _standing_rows(work, result)
                end = _end(work) - work.num_sampled_rows + len(standing)
                num_blocks = num_blocks_for(end, self._block_size)
                first_sampled = first + count - work.num_sampled_rows
                rows = [*range(first, first_sampled), *(first_sampled + row for row in standing)]
                of_sequence.learn(masses[rows, :num_blocks], end)
            first += count


def _end(work: TargetWork) -> int:
    return work.start + len(work.token_ids)


def rows_to_observe(works: Sequence[TargetWork], scores: Sequence[BlockScores | None]) -> list[int]:
    """Return how many of the last rows of each work to observe: of those that are due, and, where there are
    any, of those that soon are.
    """
    pairs = list(zip(works, scores, strict=True))
    due = [_num_wanted(work, of_sequence, is_early=False) for work, of_sequence in pairs]
    if not any(due):
        return due
    return [_num_wanted(work, of_sequence, is_early=True) for work, of_sequence in pairs]


def _num_wanted(work: TargetWork, scores: BlockScores | None, *, is_early: bool) -> int:
    if scores is None or work.num_sampled_rows == 0:
        return 0
    num_wanted = scores.num_wanted(work.start, len(work.token_ids), is_early=is_early)
    return max(num_wanted, work.num_sampled_rows) if num_wanted else 0


def _standing_rows(work: TargetWork, result: WorkResult) -> Sequence[int]:
    """Return the sampled rows of committed tokens: the first, and those of draft tokens that stand."""
    drafted = work.token_ids[len(work.token_ids) - num_drafted(work) :]
    verdict = verdict_of(drafted, node_parents(work), result.token_ids)
    return (0, *(node + 1 for node in verdict.accepted_nodes))
