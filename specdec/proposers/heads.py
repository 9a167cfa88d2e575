"""Drafts with heads over the target's hidden states: Medusa, Hydra.

A chain is drafted from one row, that which gave the last committed token, token by token: head d says what
comes d + 1 behind that token. Heads of Hydra see what was drafted before, those of Medusa do not. Tokens are
chosen as a draft model chooses them: by the token function at the target's noise, or, for rules that look at
probabilities, from a distribution that travels along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specdec.core.distributions import TokenDistribution
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.drafters.base import IndependentHeads, SequentialHeads
from specdec.model.batch import NO_TOKEN
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.draft_loop import shape_rows
from specdec.proposers.draft_sampling import DraftSampling
from specdec.proposers.hidden import HiddenSource
from specdec.proposers.prefix import SeenPrefix
from specdec.sampling.rows import RowSpec, SamplingRows, SequenceSampling
from specdec.sampling.sampler import Sampler
from specdec.sampling.shaping import LogitShaper, shaper_for
from specdec.verification.draft_rows import pack_rows

Heads = IndependentHeads | SequentialHeads


@dataclass(slots=True)
class _Chain:
    """What is drafted for one sequence."""

    view: SequenceView
    budget: int
    sampling: SequenceSampling
    shaper: LogitShaper | None
    token_ids: list[int] = field(default_factory=list)
    q_rows: list[TokenDistribution] = field(default_factory=list)


class HeadProposer:
    """Implements `Proposer` over heads without K/V of their own."""

    def __init__(
        self,
        heads: Heads,
        source: HiddenSource,
        sampler: Sampler,
        *,
        name: str,
        sampling: DraftSampling,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Draft with `heads`, on their device; token ids from `vocab_size` on are never chosen."""
        self._heads = heads
        self._source = source
        self._sampler = sampler
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._shapers: dict[RequestId, tuple[SeenPrefix, LogitShaper]] = {}
        """With the prefix that each has been told of."""
        self._device = next(heads.parameters()).device
        self._dtype = next(heads.parameters()).dtype
        self.capabilities = head_capabilities(name, sampling, heads.hidden_layers)

    @torch.inference_mode()
    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        """See `Proposer.propose`; sequences whose newest hidden states are not there have no proposal."""
        wanted = [one for one in sequences if num_draft_tokens.get(one.request_id) and one.committed_len > 1]
        found = self._source.await_rows(wanted)
        chains: list[_Chain] = []
        newest: list[torch.Tensor] = []
        for view in wanted:
            rows = found.get(view.request_id)
            if rows is not None:
                chains.append(self._begin(view, num_draft_tokens[view.request_id]))
                newest.append(rows.since(view.committed_len - 2)[-1:])
        if not chains:
            return {}
        self._draft(chains, torch.cat(newest).to(self._device, self._dtype))
        return {chain.view.request_id: self._proposal(chain) for chain in chains if chain.token_ids}

    def release(self, request_ids: Iterable[RequestId]) -> None:
        """See `Proposer.release`."""
        ids = tuple(request_ids)
        for request_id in ids:
            self._shapers.pop(request_id, None)
        self._source.release(ids)

    def close(self) -> None:
        """See `Proposer.close`."""
        self._shapers.clear()

    def _begin(self, view: SequenceView, budget: int) -> _Chain:
        depth = self._heads.max_depth
        return _Chain(
            view,
            budget if depth is None else min(budget, depth),
            self._sampling.of(view),
            self._shaper(view) if view.params.shapes_logits else None,
        )

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

    def _draft(self, chains: Sequence[_Chain], states_SF: torch.Tensor) -> None:
        """Add tokens to the chains, depth by depth, until their budgets or values that are not finite."""
        depth = 0
        active = [index for index, chain in enumerate(chains) if chain.budget > 0]
        prepared = self._prepared(states_SF)
        while active:
            logits_RV = self._logits(depth, prepared, chains, active)[:, : self._vocab_size].float()
            self._extend([chains[index] for index in active], logits_RV)
            depth += 1
            active = [
                index for index in active if depth == len(chains[index].token_ids) < chains[index].budget
            ]

    def _prepared(self, states_SF: torch.Tensor) -> torch.Tensor:
        """What `_logits` reads: of independent heads all their logits [K, S, V], of others states [S, H]."""
        return self._heads.logits(states_SF) if isinstance(self._heads, IndependentHeads) else states_SF

    def _logits(
        self, depth: int, prepared: torch.Tensor, chains: Sequence[_Chain], active: Sequence[int]
    ) -> torch.Tensor:
        if isinstance(self._heads, IndependentHeads):
            return prepared[depth, list(active)]
        paths = [[chains[index].view.token_ids[-1], *chains[index].token_ids] for index in active]
        return self._heads.logits(depth, prepared[list(active)], torch.tensor(paths, device=self._device))

    def _extend(self, chains: Sequence[_Chain], logits_RV: torch.Tensor) -> None:
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
        packed: Sequence[TokenDistribution | None] = [None] * len(chains)
        if self._sampling.gives_q_rows:
            packed = pack_rows(self._sampler.distributions(logits_RV, rows))
        for chain, token_id, q_row in zip(chains, token_ids, packed, strict=True):
            if token_id != NO_TOKEN:
                chain.token_ids.append(token_id)
                if q_row is not None:
                    chain.q_rows.append(q_row)

    def _proposal(self, chain: _Chain) -> Proposal:
        view = chain.view
        stream = self._sampling.stream_of(view.params)
        has_q = self._sampling.gives_q_rows and stream is not None
        return Proposal(
            request_id=view.request_id,
            committed_len=view.committed_len,
            prefix_hash=view.prefix_hash,
            token_ids=tuple(chain.token_ids),
            noise_stream=stream,
            q_rows=tuple(chain.q_rows) if has_q else None,
            method=self.capabilities.name,
        )


def head_capabilities(
    name: str, sampling: DraftSampling, hidden_layers: tuple[int, ...]
) -> ProposerCapabilities:
    """Return what a proposer with heads needs and gives."""
    return ProposerCapabilities(
        name=name,
        sampled=True,
        noise_stream=sampling.noise_stream,
        gives_q_rows=sampling.gives_q_rows,
        hidden_layers=hidden_layers,
    )
