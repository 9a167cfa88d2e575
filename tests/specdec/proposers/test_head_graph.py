"""Medusa, Hydra and parallel heads by recorded chains, with a recorder that works on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec.core.idle_work import idle_work_of
from specdec.core.sampling_params import SamplingParams
from specdec.model.config import CompileConfig
from specdec.proposers.base import Proposer
from specdec.proposers.draft_sampling import SHARED_NOISE, DraftSampling
from specdec.proposers.head_graph import GraphedHeads, HeadStart
from specdec.proposers.heads import HeadProposer
from specdec.sampling.sequence_sampling import SequenceSampling
from specdec.verification.registry import capabilities_of
from tests.specdec.model.replaying_recorder import ReplayingRecorder
from tests.specdec.proposers import head_proposers
from tests.specdec.proposers.made_up_states import VOCAB
from tests.specdec.proposers.proposer_setup import ProposerSetup
from tests.specdec.proposers.proposing_rounds import PARAMS, SHAPED, drafted

KINDS = ["medusa", "hydra", "parallel_heads", pytest.param("hydra++", marks=pytest.mark.full)]


def graphed(kind: str, recorder: ReplayingRecorder, **more: Any) -> GraphedHeads:
    settings: dict[str, Any] = {"num_draft_tokens": 6, "max_num_seqs": 3, "vocab_size": VOCAB, **more}
    heads = head_proposers.make_heads(kind)
    return GraphedHeads(heads, CompileConfig(), name=kind, recorder=recorder, **settings)


def make(kind: str, loop: GraphedHeads, sampling: DraftSampling = SHARED_NOISE) -> Proposer:
    proposer = head_proposers.make(kind, ProposerSetup(sampling=sampling))
    assert isinstance(proposer, HeadProposer)
    proposer._graphed = loop
    proposer.idle_work = (loop,)
    return proposer


@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_those_of_the_eager_heads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drafted(head_proposers.make(kind), seed=1)
    loop = graphed(kind, ReplayingRecorder(monkeypatch))
    answers: list[bool] = []
    own = GraphedHeads.try_draft

    def watched(
        self: GraphedHeads, rows_SR: torch.Tensor, starts: Sequence[HeadStart]
    ) -> list[list[int]] | None:
        chains = own(self, rows_SR, starts)
        answers.append(chains is not None)
        return chains

    monkeypatch.setattr(GraphedHeads, "try_draft", watched)
    assert drafted(make(kind, loop), seed=1) == expected, "before anything is recorded"
    assert not any(answers)
    answers.clear()
    proposer = make(kind, loop)
    (work,) = idle_work_of(proposer)
    while work.pending():
        work.run_next()
    assert work.state == "ready"
    assert drafted(proposer, seed=1) == expected
    assert all(answers)


def test_what_is_done_with_logits_is_left_to_the_eager_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = graphed("hydra", ReplayingRecorder(monkeypatch))
    assert loop.warm_up() == "ready"
    shaped = (SHAPED, *PARAMS)
    assert drafted(make("hydra", loop), seed=2, params=shaped) == drafted(
        head_proposers.make("hydra"), seed=2, params=shaped
    )
    told = DraftSampling.under(capabilities_of("rejection"))
    ours, theirs = (
        drafted(one, seed=3)
        for one in (make("hydra", loop, told), head_proposers.make("hydra", ProposerSetup(sampling=told)))
    )
    assert ours == theirs
    many = SequenceSampling(SamplingParams(temperature=1.0, top_k=1000), 7)
    rows = torch.zeros(1, head_proposers.make_heads("hydra").prepared_size)
    assert loop.try_draft(rows, [HeadStart(3, many, 5, 2)]) is None
    greedy = HeadStart(3, SequenceSampling(SamplingParams(temperature=0.0), 7), 5, 2)
    assert loop.try_draft(rows.expand(4, -1), [greedy] * 4) is None, "more than were asked for"
    assert loop.try_draft(rows, [greedy]) is not None


@pytest.mark.parametrize("values", [{"mode": "off"}, {"cuda_graph_max_rows": 0}])
def test_switched_off(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    heads = head_proposers.make_heads("medusa")
    config = CompileConfig.model_validate(values)
    arguments: dict[str, Any] = {
        "name": "medusa",
        "vocab_size": VOCAB,
        "num_draft_tokens": 2,
        "max_num_seqs": 2,
    }
    assert GraphedHeads(heads, config, **arguments, recorder=ReplayingRecorder(monkeypatch)).state == "off"
    assert GraphedHeads(heads, CompileConfig(), **arguments).state == "off", "on a CPU there are native calls"
