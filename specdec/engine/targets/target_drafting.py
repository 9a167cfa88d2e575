"""Drafting at the target: a proposer that reads its hidden states, in its process.

A proposal for round n + 1 needs the hidden states of what round n has accepted, and nothing newer. So it is
made at the beginning of the step that verifies it: the states are there, no message carries them, and the
coordinator asks by a number (`TargetWork.num_self_drafted`), as it asks a target that drafts with itself.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, TargetStep, TargetWork, WorkResult
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.engine.targets.proposal_check import ProposalCheck, plainly
from specdec.engine.targets.work_rows import node_parents, num_drafted, with_drafted
from specdec.proposers.base import Proposer
from specdec.proposers.several.proposer import SeveralProposers, capabilities_of_each, drafter_of
from specdec.verification.answers import verdict_of
from specdec.verification.base import RuleCapabilities


class DraftedStep(NamedTuple):
    """A step with what was drafted at the target in the place of wishes for it."""

    step: TargetStep
    drafts: tuple[Proposal | None, ...]
    """By work."""
    draft_s: float
    """Seconds that it took."""
    drafters_s: tuple[float, ...] = ()
    """Of these, what each of several drafters took."""

    @property
    def has_drafts(self) -> bool:
        """Whether anything was drafted."""
        return any(draft is not None for draft in self.drafts)


class TargetDrafting:
    """Shows a proposer the sequences as far as the target has come with them."""

    def __init__(self, proposer: Proposer, rule: RuleCapabilities, vocab_size: int) -> None:
        """Draft with `proposer`, which is released and closed from here, for a target with so many tokens.

        It may be several: a work says which of them it has (`TargetWork.drafter`).

        Raises:
            ConfigError: the rule cannot work with what the proposer gives.
        """
        self._proposer = proposer
        self._several = proposer if isinstance(proposer, SeveralProposers) else None
        self._checks = [ProposalCheck(one, rule, vocab_size) for one in capabilities_of_each(proposer)]
        self._sequences: dict[RequestId, _Watched] = {}
        self.counters: Counter[str] = Counter()
        """target_drafts_stale, target_drafts_malformed, target_drafts_unverifiable: proposals that were
        dropped."""

    @property
    def proposer(self) -> Proposer:
        """What drafts."""
        return self._proposer

    def admit(self, admitted: AdmittedSequence) -> None:
        """Begin with a sequence."""
        self._sequences[admitted.request_id] = _Watched(admitted)

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """Forget sequences."""
        known = [one for one in request_ids if self._sequences.pop(one, None) is not None]
        if known:
            self._proposer.release(known)

    def close(self) -> None:
        """Forget everything and close the proposer. Idempotent."""
        self._sequences.clear()
        self._proposer.close()

    def draft(self, works: Sequence[TargetWork]) -> tuple[Proposal | None, ...]:
        """Return what to verify behind each work.

        A sequence whose prompt is still read is shown without a budget, up to the token that this step begins
        with: the hidden states before it are there.
        """
        views: list[_Watched] = []
        budgets: dict[RequestId, int] = {}
        for work in works:
            view = self._sequences[work.request_id]
            view.see(work.start, work.token_ids[:1])
            view.kv_budget, view.drafter = work.kv_budget, work.drafter
            if work.start == 0 or work.drafter < 0:
                continue
            views.append(view)
            if work.num_self_drafted and len(work.token_ids) == 1:
                budgets[work.request_id] = work.num_self_drafted
        proposals = self._proposer.propose(views, budgets) if views else {}
        return tuple(self._fitting(proposals.get(work.request_id), work) for work in works)

    def take_seconds(self) -> tuple[float, ...]:
        """Return what each of several drafters took in the last `draft`, once; empty if there is one."""
        if self._several is None:
            return ()
        seconds = self._several.take_seconds()
        return tuple(seconds.get(place, 0.0) for place in range(len(self._checks)))

    def learn(self, works: Sequence[TargetWork], results: Sequence[WorkResult]) -> None:
        """After the step: note the tokens that its works, drafts behind them, have brought."""
        for work, result in zip(works, results, strict=True):
            first = len(work.token_ids) - max(0, num_drafted(work))
            committed, drafted = work.token_ids[:first], work.token_ids[first:]
            if result.token_ids:
                committed += verdict_of(drafted, node_parents(work), result.token_ids).token_ids
            self._sequences[work.request_id].see(work.start, committed)

    def _fitting(self, proposal: Proposal | None, work: TargetWork) -> Proposal | None:
        if proposal is None or not proposal.token_ids:
            return None
        view = self._sequences[work.request_id]
        fault = self._checks[drafter_of(view)].fault(proposal, view, work.num_self_drafted)
        if fault is None:
            return plainly(proposal)
        self.counters[f"target_drafts_{fault}"] += 1
        return None


def with_draft(work: TargetWork, draft: Proposal | None) -> TargetWork:
    """Return the work of verifying a draft behind a work of committed tokens; without one, the work alone."""
    if not work.num_self_drafted:
        return work
    if draft is None:
        return msgspec.structs.replace(work, num_self_drafted=0)
    verified = with_drafted(work, draft.token_ids, draft.parents)
    return msgspec.structs.replace(verified, noise_stream=draft.noise_stream, q_rows=draft.q_rows)


def with_told_drafts(
    results: Sequence[WorkResult], drafts: Sequence[Proposal | None]
) -> tuple[WorkResult, ...]:
    """Return results that tell what was drafted."""
    return tuple(
        result
        if draft is None
        else msgspec.structs.replace(result, drafted=draft.token_ids, drafted_parents=draft.parents)
        for result, draft in zip(results, drafts, strict=True)
    )


class _Watched:
    """A sequence as far as the target knows it. Satisfies `SequenceView`, and `HasDrafter`."""

    owner = None
    constraint = None
    """Whoever has the grammar does not have the target draft."""

    def __init__(self, admitted: AdmittedSequence) -> None:
        self.request_id = admitted.request_id
        self.params: SamplingParams = admitted.params
        self.seed = admitted.seed
        self.cache_salt = admitted.cache_salt
        self.num_prompt_tokens = admitted.num_prompt_tokens
        self.kv_budget = 0
        self.drafter = 0
        self._known = list(admitted.token_ids)
        self.token_ids: list[int] = []
        self._hashes = array("Q", (EMPTY_PREFIX,))
        """Of every prefix, the empty one first."""

    @property
    def committed_len(self) -> int:
        return len(self.token_ids)

    @property
    def prefix_hash(self) -> int:
        return self._hashes[-1]

    def see(self, start: int, token_ids: Sequence[int]) -> None:
        """Let the sequence be its first `start` tokens and these."""
        length = len(self.token_ids)
        if length < start:  # a cached prefix: its tokens came with the admission
            assert start <= len(self._known), f"{self.request_id}: tokens before position {start} are unknown"
            self._extend(self._known[length:start])
        elif length > start + len(token_ids) or self.token_ids[start:] != list(token_ids[: length - start]):
            del self.token_ids[start:]
            del self._hashes[start + 1 :]
        self._extend(token_ids[len(self.token_ids) - start :])

    def _extend(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        for token_id in token_ids:
            self._hashes.append(extend_prefix_hash(self._hashes[-1], (token_id,)))
