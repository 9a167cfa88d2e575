"""Drafts chains with heads over the target's hidden states: Medusa, Hydra, parallel heads.

A chain is drafted from one row, made of the state that gave the last committed token, token by token: head d
says what comes d + 1 behind that token. Heads of Hydra see what was drafted before, others do not. Tokens are
chosen as a draft model chooses them: by the token function at the target's noise, or, for rules that look at
probabilities, from a distribution that travels along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specdec.core.distributions import TokenDistribution
from specdec.core.idle_work import IdleWork
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.drafters.base import IndependentHeads, SequentialHeads
from specdec.model.batch import NO_TOKEN, NativeChooser
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.compiled_drafters import CompiledHeads
from specdec.proposers.draft_loop import shape_rows
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.head_graph import GraphedHeads, HeadStart
from specdec.proposers.head_rows import HeadRows
from specdec.proposers.prefix import SeenPrefix
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import Sampler
from specdec.sampling.sequence_sampling import SequenceSampling
from specdec.sampling.shaping import LogitShaper, shaper_for
from specdec.verification.draft_rows import pack_rows

Heads = IndependentHeads | SequentialHeads


class HeadLogits:
    """What heads say behind some prefixes."""

    def __init__(
        self,
        heads: Heads,
        rows_SR: torch.Tensor,
        last_token_ids: Sequence[int],
        compiled: CompiledHeads | None = None,
    ) -> None:
        """Ask `heads`, given the rows of the prefixes and their last tokens; `compiled`, once it is ready."""
        self._heads = heads
        self._rows_SR = rows_SR
        self._last_token_ids = last_token_ids
        self._compiled = compiled
        self._logits_KSV: torch.Tensor | None = None

    def behind(self, prefixes: Sequence[int], paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return logits [R, V], fp32, behind prefixes (by number) and paths of drafts, all of one length."""
        depth = len(paths[0])
        if self._compiled is not None:
            native = self._compiled.try_logits(depth, self._inputs(prefixes, paths))
            if native is not None:
                return native
        if isinstance(self._heads, SequentialHeads):
            return self._heads.head(depth, self._inputs(prefixes, paths)).float()
        if self._logits_KSV is None:
            # The same whatever is drafted, so they are asked once, for all depths.
            self._logits_KSV = self._heads.logits(self._rows_SR)
        return self._logits_KSV[depth, list(prefixes)].float()

    def try_choose(
        self,
        prefixes: Sequence[int],
        paths: Sequence[Sequence[int]],
        chooser: NativeChooser,
        sequences: Sequence[int],
        positions: Sequence[int],
    ) -> list[int] | None:
        """Choose a token behind every path, where that is compiled; the rest is as in `behind`.

        Args:
            prefixes: by number, of each path.
            paths: of drafts, all of one length.
            chooser: is called on the logits.
            sequences: that it knows, of each path.
            positions: where the tokens will stand.
        """
        if self._compiled is None or not self._compiled.is_ready:
            return None
        inputs = self._inputs(prefixes, paths)
        return self._compiled.try_choose(len(paths[0]), inputs, chooser, sequences, positions)

    def _inputs(self, prefixes: Sequence[int], paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return what the head behind these paths reads, [R, I], contiguous."""
        rows_RR = self._rows_SR
        if len(prefixes) != len(rows_RR) or any(index != number for index, number in enumerate(prefixes)):
            rows_RR = rows_RR[list(prefixes)]
        if not isinstance(self._heads, SequentialHeads):
            return rows_RR
        seen = [[self._last_token_ids[prefix], *path] for prefix, path in zip(prefixes, paths, strict=True)]
        return self._heads.inputs(rows_RR, torch.tensor(seen, device=rows_RR.device))


@dataclass(slots=True)
class HeadDraft:
    """What is drafted for one sequence."""

    view: SequenceView
    budget: int
    row: torch.Tensor
    """[1, R]: what the heads read."""
    sampling: SequenceSampling
    shaper: LogitShaper | None
    token_ids: list[int] = field(default_factory=list)
    q_rows: list[TokenDistribution] = field(default_factory=list)
    parents: tuple[int, ...] | None = None
    """Of a tree, as `Proposal.parents`."""


class HeadProposer:
    """Implements `Proposer` over heads."""

    def __init__(
        self,
        heads: Heads,
        rows: HeadRows,
        sampler: Sampler,
        *,
        name: str,
        sampling: DraftSampling,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        compiled: CompiledHeads | None = None,
        graphed: GraphedHeads | None = None,
    ) -> None:
        """Draft with `heads` from `rows`; token ids from `vocab_size` on are never chosen.

        `compiled` is the native form of the heads, `graphed` their form on a GPU, ready or not.
        """
        self._heads = heads
        self._compiled, self._graphed = compiled, graphed
        self.idle_work: Sequence[IdleWork] = [one for one in (compiled, graphed) if one is not None]
        self._rows = rows
        self._sampler = sampler
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._shapers: dict[RequestId, tuple[SeenPrefix, LogitShaper]] = {}
        """With the prefix that each has been told of."""
        self.capabilities = ProposerCapabilities(
            name=name,
            sampled=True,
            noise_stream=sampling.noise_stream,
            gives_q_rows=sampling.gives_q_rows,
            kv="own" if heads.attention_layers else "none",
            hidden_layers=heads.hidden_layers,
        )

    @torch.inference_mode()
    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """See `Proposer.propose`; sequences whose newest hidden states are not there have no proposal."""
        rows = self._rows.read(sequences, num_draft_tokens)
        drafts = [
            self._begin(view, num_draft_tokens[view.request_id], row)
            for view in sequences
            if (row := rows.get(view.request_id)) is not None
        ]
        if drafts:
            self._draft(drafts)
        return {draft.view.request_id: self._proposal(draft) for draft in drafts if draft.token_ids}

    @property
    def missing_states(self) -> Mapping[RequestId, int]:
        """See `proposers.base.ReadsStates`."""
        return self._rows.missing

    def num_unread(self, view: SequenceView) -> int:
        """See `proposers.base.ReadsAlong`."""
        return self._rows.num_unread(view)

    def has_room(self, owner: str, num_tokens: int) -> bool:
        """See `proposers.base.HasRoom`."""
        return self._rows.has_room(owner, num_tokens)

    @property
    def memory_held(self) -> float:
        """See `proposers.base.HasRoom`."""
        return self._rows.memory_held

    @property
    def crowded_out(self) -> Sequence[RequestId]:
        """See `proposers.base.HasRoom`."""
        return self._rows.crowded_out

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """See `Proposer.release`."""
        ids = tuple(request_ids)
        for request_id in ids:
            self._shapers.pop(request_id, None)
        self._rows.release(ids)

    def close(self) -> None:
        """See `Proposer.close`."""
        self._shapers.clear()

    def _begin(self, view: SequenceView, budget: int, row: torch.Tensor) -> HeadDraft:
        shaper = self._shaper(view) if view.params.shapes_logits else None
        return HeadDraft(view, budget, row, self._sampling.of(view), shaper)

    def _shaper(self, view: SequenceView) -> LogitShaper:
        seen, shaper = self._shapers.get(view.request_id, (SeenPrefix(), None))
        if shaper is None or not seen.continues_in(view):
            seen = SeenPrefix()
            shaper = shaper_for(
                view.params, eos_token_ids=self._eos_token_ids, num_prompt_tokens=view.num_prompt_tokens
            )
            assert shaper is not None
            self._shapers[view.request_id] = seen, shaper
        shaper.commit(view.token_ids[seen.length :])
        seen.update(view)
        return shaper

    def _draft(self, drafts: Sequence[HeadDraft]) -> None:
        """Add tokens to the chains, depth by depth, until their budgets or values that are not finite."""
        rows_SR = torch.cat([draft.row for draft in drafts])
        if self._try_graphs(drafts, rows_SR):
            return
        logits = HeadLogits(
            self._heads,
            rows_SR,
            [draft.view.token_ids[-1] for draft in drafts],
            self._compiled,
        )
        depth, max_depth = 0, self._heads.max_depth
        active = list(range(len(drafts)))
        chooser = self._native_chooser(drafts)
        while active and depth < max_depth:
            chains = [drafts[number] for number in active]
            token_ids = None
            if chooser is not None:
                positions = [chain.view.committed_len + depth for chain in chains]
                paths = [chain.token_ids for chain in chains]
                token_ids = logits.try_choose(active, paths, chooser, active, positions)
            if token_ids is None:
                logits_RV = logits.behind(active, [chain.token_ids for chain in chains])
                token_ids = self._choose(chains, logits_RV[:, : self._vocab_size])
            for chain, token_id in zip(chains, token_ids, strict=True):
                if token_id != NO_TOKEN:
                    chain.token_ids.append(token_id)
            depth += 1
            active = [
                number for number in active if depth == len(drafts[number].token_ids) < drafts[number].budget
            ]

    def _try_graphs(self, drafts: Sequence[HeadDraft], rows_SR: torch.Tensor) -> bool:
        """Draft whole chains at once, if that can be done for these."""
        if self._graphed is None or self._is_shaped(drafts):
            return False
        starts = [
            HeadStart(draft.view.token_ids[-1], draft.sampling, draft.view.committed_len, draft.budget)
            for draft in drafts
        ]
        chains = self._graphed.try_draft(rows_SR, starts)
        for draft, chain in zip(drafts, chains or (), strict=chains is not None):
            draft.token_ids = chain
        return chains is not None

    def _is_shaped(self, chains: Sequence[HeadDraft]) -> bool:
        """Whether something happens between what heads say and what is chosen."""
        return self._sampling.gives_q_rows or any(
            chain.shaper is not None or chain.view.constraint is not None for chain in chains
        )

    def _native_chooser(self, chains: Sequence[HeadDraft]) -> NativeChooser | None:
        """Return what chooses where the logits come out; None: something has to happen in between."""
        if self._compiled is None or not self._compiled.is_ready or self._is_shaped(chains):
            return None
        return self._sampler.chooser(
            [chain.sampling for chain in chains], self._vocab_size, self._sampling.noise_stream
        )

    def _choose(self, chains: Sequence[HeadDraft], logits_RV: torch.Tensor) -> list[int]:
        """Return the next token of every chain; note what it was drawn from, where that is to be told."""
        specs = [
            RowSpec(*chain.sampling, chain.view.committed_len + len(chain.token_ids), 1) for chain in chains
        ]
        rows = SamplingRows.build(specs, logits_RV.device)
        if any(chain.shaper is not None or chain.view.constraint is not None for chain in chains):
            logits_RV = logits_RV.clone()
            for index, chain in enumerate(chains):
                own = logits_RV[index : index + 1]
                shape_rows(own, chain.shaper, chain.view.constraint, [chain.token_ids], 0)
        sampled = self._sampler.sample(logits_RV, rows, self._sampling.noise_stream)
        token_ids: list[int] = sampled.token_ids.masked_fill(~sampled.finite, NO_TOKEN).tolist()
        if self._sampling.gives_q_rows:
            packed = pack_rows(self._sampler.distributions(logits_RV, rows))
            for chain, token_id, q_row in zip(chains, token_ids, packed, strict=True):
                if token_id != NO_TOKEN:
                    chain.q_rows.append(q_row)
        return token_ids

    def _proposal(self, draft: HeadDraft) -> Proposal:
        view = draft.view
        stream = self._sampling.stream_of(view.params)
        has_q = self._sampling.gives_q_rows and stream is not None
        return Proposal(
            request_id=view.request_id,
            committed_len=view.committed_len,
            prefix_hash=view.prefix_hash,
            token_ids=tuple(draft.token_ids),
            parents=draft.parents,
            noise_stream=stream,
            q_rows=tuple(draft.q_rows) if has_q else None,
            method=self.capabilities.name,
        )
