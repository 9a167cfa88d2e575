"""Heads as proposers, over made-up hidden states: a row is drawn from the hash of the prefix that it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.core.ids import RequestId
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.drafters.base import TargetParts
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.proposers.base import Proposer
from specdec.proposers.draft_sampling import SHARED_NOISE, DraftSampling
from specdec.proposers.heads import HeadProposer
from specdec.proposers.hidden import HiddenRows
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import Sampler, noisy_scores
from specdec.verification.registry import capabilities_of
from tests.specdec.drafters.conftest import HIDDEN, randomize, tiny_config
from tests.specdec.proposers.contract import ProposerContract, view

VOCAB = 24


class MadeUpRows:
    first_row = 0

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self.end_row = len(token_ids) - 1

    def since(self, row: int) -> torch.Tensor:
        return torch.stack([made_up_row(self._token_ids[: at + 1]) for at in range(row, self.end_row)])


def made_up_row(token_ids: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(extend_prefix_hash(EMPTY_PREFIX, token_ids) >> 1)
    return torch.randn(HIDDEN, generator=generator)


class MadeUpSource:
    def __init__(self, missing: Sequence[str] = ()) -> None:
        self._missing = missing

    def await_rows(self, sequences: Sequence[SequenceView]) -> Mapping[RequestId, HiddenRows]:
        return {
            one.request_id: MadeUpRows(one.token_ids)
            for one in sequences
            if one.request_id not in self._missing
        }

    def release(self, request_ids: Sequence[RequestId]) -> None:
        """Nothing is kept."""


def make_heads(kind: str) -> Medusa | Hydra:
    model = AutoModelForCausalLM.from_config(tiny_config(vocab_size=VOCAB))
    randomize(model, seed=1)
    target = TargetParts.of(model)
    heads = Medusa(target, num_heads=3) if kind == "medusa" else Hydra(target, num_heads=3)
    randomize(heads, seed=5)
    return heads.eval()


def make(kind: str, sampling: DraftSampling = SHARED_NOISE, missing: Sequence[str] = ()) -> HeadProposer:
    source = MadeUpSource(missing)
    return HeadProposer(make_heads(kind), source, Sampler(), name=kind, sampling=sampling, vocab_size=VOCAB)


class TestMedusa(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("medusa")


class TestHydra(ProposerContract):
    def make_proposer(self) -> Proposer:
        return make("hydra")


PLAIN, SHAPED = SamplingParams(), SamplingParams(repetition_penalty=2.5, presence_penalty=1.0)


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
@pytest.mark.parametrize("params", [PLAIN, SamplingParams(temperature=0.0)], ids=["sampled", "greedy"])
def test_a_chain_is_what_the_token_function_chooses_on_the_heads(kind: str, params: SamplingParams) -> None:
    one = view("a", [3, 9, 4, 11], params)
    proposal = make(kind).propose([one], {one.request_id: 9})[one.request_id]
    assert proposal.num_tokens == 3, "no more than there are heads"
    heads, state = make_heads(kind), made_up_row(one.token_ids[:-1])
    expected: list[int] = []
    with torch.no_grad():
        for depth in range(3):
            if isinstance(heads, Medusa):
                logits = heads.logits(state)[depth]
            else:
                logits = heads.logits(depth, state, torch.tensor([one.token_ids[-1], *expected]))
            rows = SamplingRows.build([RowSpec(params, one.seed, one.committed_len + depth, 1)])
            expected.append(int(noisy_scores(logits[None], rows).argmax()))
    assert proposal.token_ids == tuple(expected)


def test_what_a_request_does_to_logits_is_done_to_the_heads() -> None:
    """Also after a prefix that went another way."""
    proposer = make("medusa")
    for token_ids in ([3, 9, 4, 11], [3, 9, 4, 11, 5, 5], [3, 9, 8, 11, 5, 5, 2]):
        one = view("a", token_ids, SHAPED)
        budgets = {one.request_id: 3}
        assert proposer.propose([one], budgets) == make("medusa").propose([one], budgets)


def test_q_rows_are_those_that_tokens_were_drawn_from() -> None:
    sampling = DraftSampling.under(capabilities_of("rejection"))
    one = view("a", [3, 9, 4, 11], PLAIN)
    proposal = make("hydra", sampling).propose([one], {one.request_id: 3})[one.request_id]
    assert proposal.noise_stream == "draft"
    assert proposal.q_rows is not None
    assert len(proposal.q_rows) == 3
    greedy = view("a", [3, 9, 4, 11], SamplingParams(temperature=0.0))
    proposal = make("hydra", sampling).propose([greedy], {greedy.request_id: 3})[greedy.request_id]
    assert (proposal.noise_stream, proposal.q_rows) == (None, None)


def test_who_has_no_hidden_states_has_no_proposal() -> None:
    views = [view("a", [3, 9, 4]), view("b", [3, 9, 4]), view("c", [3])]
    proposer = make("medusa", missing=["a"])
    assert list(proposer.propose(views, {one.request_id: 2 for one in views})) == ["b"]
