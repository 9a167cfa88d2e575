"""From a plan and its drafts to the step that the target is given."""

from __future__ import annotations

import itertools

import msgspec

from specdec.core.plan import AdmittedSequence, TargetStep, TargetWork
from specdec.core.proposal import Proposal
from specdec.engine.requests.live_request import LiveRequest
from specdec.engine.requests.roster import Roster
from specdec.engine.rounds.drafting import Drafting, Proposals
from specdec.engine.rounds.grammar_drafts import masked_draft
from specdec.scheduling.state import RoundPlan


class Packer:
    """Packs the steps of one engine, which it numbers."""

    def __init__(self, roster: Roster, drafting: Drafting, *, needs_p_rows: bool) -> None:
        """`needs_p_rows`: whether the rule compares distributions, so that the target verifies."""
        self._roster = roster
        self._drafting = drafting
        self._needs_p_rows = needs_p_rows
        self._step_ids = itertools.count()

    def pack(self, plan: RoundPlan, proposals: Proposals) -> TargetStep:
        """Return the step of a round; drafts that a grammar has cut are cut in `proposals`, too."""
        admitted: list[AdmittedSequence] = []
        works: list[TargetWork] = []
        for request_id, num_tokens in plan.num_tokens.items():
            live = self._roster.running[request_id]
            if not live.is_known_to_target:
                live.is_known_to_target = True
                admitted.append(live.admission(tells_tokens=self._drafting.tells_tokens))
            room = plan.num_draft_tokens.get(request_id, 0)
            num_beside = plan.num_rows_beside.get(request_id, 0)
            end = live.num_computed + num_tokens - room - num_beside
            proposal, masks, num_self_drafted = proposals.get(request_id), None, 0
            if live.grammar is not None and end == live.committed_len and live.generates:
                proposal, masks = masked_draft(
                    live, live.grammar, proposal, room, needs_p_rows=self._needs_p_rows
                )
                proposals[request_id] = proposal
            elif self._drafts_at_target(live) and end == live.committed_len and proposal is None:
                num_self_drafted = room
            work = self._work(live, end, proposal, masks, num_self_drafted)
            beside = None if proposal is None else proposal.beside
            if beside is not None and beside.num_rows <= num_beside:
                work = msgspec.structs.replace(work, beside=beside)
            works.append(work)
        return TargetStep(
            step_id=next(self._step_ids),
            works=tuple(works),
            admitted=tuple(admitted),
            released=self._roster.take_forgotten(),
            moves=self._roster.take_moves(),
        )

    def _drafts_at_target(self, live: LiveRequest) -> bool:
        return self._drafting.is_at_target(live) and live.generates

    def _is_followed_at_target(self, live: LiveRequest) -> bool:
        """Whether what drafts at the target reads a request's tokens, though another may draft for it now."""
        return self._drafts_at_target(live) or (live.generates and self._drafting.tells_tokens)

    def _work(
        self,
        live: LiveRequest,
        end: int,
        proposal: Proposal | None,
        masks: tuple[bytes, ...] | None,
        num_self_drafted: int,
    ) -> TargetWork:
        """Return the work of committed tokens up to `end` and a proposal behind them."""
        drafted: tuple[int, ...] = ()
        noise_stream, q_rows, parents = None, None, None
        if proposal is not None:
            drafted = proposal.token_ids
            if proposal.parents is not None:
                num_before = end - live.num_computed
                parents = tuple(num_before + parent for parent in proposal.parents)
            if self._needs_p_rows:
                noise_stream, q_rows = proposal.noise_stream, proposal.q_rows
        update = live.table.take_update()
        return TargetWork(
            request_id=live.request_id,
            token_ids=(*live.token_ids[live.num_computed : end], *drafted),
            start=live.num_computed,
            num_sampled_rows=1 + len(drafted) if end == live.committed_len and live.generates else 0,
            table_start=update.start,
            block_ids=update.block_ids,
            parents=parents,
            noise_stream=noise_stream,
            q_rows=q_rows,
            masks=masks,
            scored_token_ids=live.scored_token_ids(end) if live.scores_prompt else (),
            num_self_drafted=num_self_drafted,
            kv_budget=live.kv_budget if self._is_followed_at_target(live) else 0,
            drafter=self._drafting.drafter_at_target(live),
        )
