"""A drafter that is one matrix for each token to come, over the state that the target's head reads.

The matrices are fitted, in closed form, to texts of the target: about what the first heads of Medusa are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.proposers.base import ProposerCapabilities
from specdec.proposers.hidden import HiddenSource
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import noisy_scores
from tests.architectures import VOCAB_SIZE

LAYERS = (1, -1)
CAPABILITIES = ProposerCapabilities(name="linear-heads", sampled=True, hidden_layers=LAYERS)


def hidden_of(reference: Any, token_ids: Sequence[int], layers: Sequence[int] = LAYERS) -> torch.Tensor:
    """What transformers says about the states of these layers, [tokens, width]."""
    with torch.inference_mode():
        output = reference(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
    return torch.cat([output.hidden_states[layer][0] for layer in layers], dim=-1).float()


def fit_heads(
    reference: Any, texts: Sequence[Sequence[int]], num_heads: int, layers: Sequence[int] = LAYERS
) -> torch.Tensor:
    """Return weights [num_heads, width, vocabulary]: head d says what comes d + 2 behind a row's token."""
    rows = [hidden_of(reference, text, layers) for text in texts]
    heads = []
    for depth in range(num_heads):
        inputs = torch.cat([states[: -depth - 2] for states in rows]).double()
        wanted = torch.tensor([token for text in texts for token in text[depth + 2 :]])
        outputs = torch.nn.functional.one_hot(wanted, VOCAB_SIZE).double()
        gram = inputs.T @ inputs + 0.1 * torch.eye(inputs.shape[1], dtype=torch.float64)
        heads.append(8.0 * torch.linalg.solve(gram, inputs.T @ outputs))
    return torch.stack(heads).float()


TREE_WIDTHS = (2, 2, 1)
"""Children of every node, by depth: each head's best tokens, in whatever way they are put together."""


class Seen(NamedTuple):
    """What the drafter was shown of a sequence, and what it made of it."""

    token_ids: tuple[int, ...]
    rows: torch.Tensor
    drafted: tuple[int, ...]


class LinearHeads:
    """Implements `Proposer`, for trees where `capabilities` say so, and remembers what it was shown."""

    def __init__(
        self,
        source: HiddenSource,
        weights: torch.Tensor,
        capabilities: ProposerCapabilities = CAPABILITIES,
    ) -> None:
        self.capabilities = capabilities
        self._source = source
        self._weights = weights
        self.seen: list[Seen] = []

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        wanted = [one for one in sequences if num_draft_tokens.get(one.request_id) and one.committed_len > 1]
        rows = self._source.await_rows(wanted)
        proposals: dict[RequestId, Proposal] = {}
        for one in wanted:
            if one.request_id not in rows:
                continue
            budget = num_draft_tokens[one.request_id]
            its = rows[one.request_id]
            drafted, parents = self._draft(one, its.since(one.committed_len - 2)[-1], budget)
            self.seen.append(Seen(tuple(one.token_ids), its.since(its.first_row), drafted))
            proposals[one.request_id] = Proposal(
                request_id=one.request_id,
                committed_len=one.committed_len,
                prefix_hash=one.prefix_hash,
                token_ids=drafted,
                parents=parents,
                noise_stream="target",
                method=self.capabilities.name,
            )
        return proposals

    def _draft(
        self, one: SequenceView, row: torch.Tensor, budget: int
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        depth = len(self._weights)
        logits = torch.einsum("w,kwv->kv", row.float(), self._weights)
        rows = SamplingRows.build([RowSpec(one.params, one.seed, one.committed_len, depth)])
        scores = noisy_scores(logits, rows)
        if self.capabilities.shape == "chain":
            return tuple(scores.argmax(-1).tolist())[:budget], None
        token_ids: list[int] = []
        parents: list[int] = []
        level = [-1]
        for width, best in zip(TREE_WIDTHS, scores.topk(max(TREE_WIDTHS)).indices.tolist(), strict=False):
            first = len(token_ids)
            for parent in level:
                # The worse first: what stands then seldom lies where it has to go.
                token_ids += best[:width][::-1]
                parents += [parent] * width
            level = list(range(first, len(token_ids)))
        return tuple(token_ids[:budget]), tuple(parents[:budget])

    def release(self, request_ids: Iterable[RequestId]) -> None:
        self._source.release(tuple(request_ids))

    def close(self) -> None:
        """Nothing to free."""
