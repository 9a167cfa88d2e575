"""EAGLE, EAGLE-3 and MTP by recorded steps and chains, with a recorder that works on a CPU.

Real graphs are recorded in tests/gpu.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from specdec.attention.triton import TritonPagedAttention
from specdec.core.idle_work import idle_work_of
from specdec.drafters.base import FeatureDrafter
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig
from specdec.model.graph_recorder import Recorder
from specdec.proposers.base import Proposer
from specdec.proposers.draft_graph import GraphedDraftLoop
from specdec.proposers.draft_loop import ChainStart
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_trees import TreeDraftProposer
from specdec.proposers.feature_runner import FeatureRunner
from specdec.proposers.hidden import PrefixStates
from specdec.sampling.sampler import Sampler
from specdec.tree.growth import TreeShape
from tests.specdec.model.replaying_recorder import ReplayingRecorder
from tests.specdec.proposers import test_features
from tests.specdec.proposers.test_compiled_drafters import drafted
from tests.specdec.proposers.test_features import make_drafter
from tests.specdec.proposers.test_heads import VOCAB, MadeUpSource
from tests.triton_interpreter import needs_interpreter

KINDS = ["eagle3", *(pytest.param(one, marks=pytest.mark.full) for one in ("eagle", "eagle3.1", "mtp"))]
CONFIG = CompileConfig(cuda_graph_max_rows=8)


def on_device(kind: str, device: str) -> FeatureDrafter:
    """Return a drafter with what it borrows of its target."""
    drafter = make_drafter(kind)
    if device == "cpu":
        return drafter
    moved = copy.deepcopy(drafter).to(device)
    ends = {name: getattr(moved.target, name).to(device) for name in ("embeddings", "final_norm", "head")}
    moved.target = replace(moved.target, **ends)
    return moved


def make_graphed(
    kind: str, recorder: Recorder | None, shape: TreeShape | None = None, device: str = "cpu"
) -> Proposer:
    drafter, sampler = on_device(kind, device), Sampler()
    runner = FeatureRunner(
        drafter,
        CacheConfig(block_size=4, num_blocks=100),
        max_num_seqs=4,
        max_model_len=64,
        backend=TritonPagedAttention(torch.device(device), max_context=64),
    )
    steps = runner.record(CONFIG, takes_trees=shape is not None, recorder=recorder)
    states = PrefixStates(MadeUpSource(), drafter.hidden_layers)
    if shape is not None:
        return TreeDraftProposer(
            runner,
            sampler,
            shape,
            vocab_size=VOCAB,
            idle_work=(steps,),
            prefix_caching=False,
            name=kind,
            states=states,
            generating=runner,
        )
    loop = runner.record_loop(
        CONFIG, vocab_size=VOCAB, num_draft_tokens=6, max_num_seqs=4, stream="target", recorder=recorder
    )
    return DraftModelProposer(
        runner,
        sampler,
        vocab_size=VOCAB,
        fused_loop=loop,
        idle_work=(loop, steps),
        prefix_caching=False,
        name=kind,
        states=states,
    )


def recorded(proposer: Proposer) -> Proposer:
    for work in idle_work_of(proposer):
        while work.pending():
            work.run_next()
        assert work.state == "ready"
    return proposer


@needs_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_chains_are_those_of_the_eager_drafter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ragged batches, several tokens to catch up on, mixed budgets and parameters."""
    expected = drafted(test_features.make(kind), seed=1)
    proposer = make_graphed(kind, ReplayingRecorder(monkeypatch))
    answers: list[bool] = []
    own = GraphedDraftLoop.try_draft

    def watched(self: GraphedDraftLoop, starts: Sequence[ChainStart]) -> list[list[int]] | None:
        chains = own(self, starts)
        answers.append(chains is not None)
        return chains

    monkeypatch.setattr(GraphedDraftLoop, "try_draft", watched)
    assert drafted(recorded(proposer), seed=1) == expected
    assert True in answers, "what has few tokens to catch up on is one recorded chain"
    assert False in answers, "prompts are not"


@needs_interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [test_features.STATIC, test_features.DYNAMIC], ids=["static", "dynamic"])
def test_trees_are_those_of_the_eager_drafter(
    kind: str, shape: TreeShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = drafted(test_features.make(kind, shape=shape), seed=2)
    proposer = make_graphed(kind, ReplayingRecorder(monkeypatch), shape)
    assert drafted(recorded(proposer), seed=2) == expected


@needs_interpreter
def test_until_it_is_recorded_all_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = drafted(test_features.make("eagle3"), seed=3)
    proposer = make_graphed("eagle3", ReplayingRecorder(monkeypatch))
    assert drafted(proposer, seed=3) == expected
