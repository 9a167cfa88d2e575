"""Verification at the target, for rules that look at distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.core.plan import TargetWork
from specdec.engine.targets.work_rows import node_parents
from specdec.sampling.sequence_sampling import SequenceSampling
from specdec.verification.base import Draft, TargetRows, VerificationRule
from specdec.verification.chance import CounterChance
from specdec.verification.draft_rows import unpack_rows

if TYPE_CHECKING:
    import torch


class Judge:
    """Decides which draft tokens of a work stand."""

    def __init__(self, rule: VerificationRule) -> None:
        """Decide by `rule`, one that needs p rows."""
        assert rule.capabilities.needs_p_rows, "whoever has the target's tokens can match them with the draft"
        self.rule = rule

    def concerns(self, work: TargetWork, sampling: SequenceSampling) -> bool:
        """Return whether this work is to be decided here.

        At temperature 0 it is not: every rule then keeps what equals the target's own choice, which needs no
        distributions.
        """
        return work.num_sampled_rows > 1 and not sampling.params.is_greedy

    def decide(self, work: TargetWork, sampling: SequenceSampling, p_rows: torch.Tensor) -> tuple[int, ...]:
        """Return the draft tokens that stand and the token that follows them.

        Args:
            work: a chain, or a tree.
            sampling: of its sequence.
            p_rows: [n, vocab], the distributions at the first n of its sampled rows; draft tokens of a chain
                from number n - 1 on are left out. Of a tree, those at all of them.

        Raises:
            ValueError: the draft is not what the rule works with.
        """
        num_drafted = p_rows.shape[0] - 1
        first = len(work.token_ids) - work.num_sampled_rows + 1
        q_rows = None
        if work.q_rows is not None and self.rule.capabilities.needs_q_rows:
            q_rows = unpack_rows(work.q_rows[:num_drafted], p_rows.shape[1], p_rows.device)
        draft = Draft(
            token_ids=work.token_ids[first : first + num_drafted],
            first_position=work.start + first,
            parents=node_parents(work),
            noise_stream=work.noise_stream,
            q_rows=q_rows,
        )
        chance = CounterChance(sampling.seed)
        return self.rule.verify(draft, TargetRows(p_rows=p_rows), chance).token_ids
