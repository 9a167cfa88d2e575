"""EAGLE, EAGLE-3 and MTP by recorded steps and chains, on a GPU or with a recorder that works on a CPU."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from specdec.attention.triton import TritonPagedAttention
from specdec.core.idle_work import idle_work_of
from specdec.drafters.base import FeatureDrafter
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig
from specdec.model.graph_recorder import Recorder
from specdec.proposers.base import Proposer
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.draft_trees import TreeDraftProposer
from specdec.proposers.feature_runner import FeatureRunner
from specdec.proposers.hidden import PrefixStates
from specdec.sampling.sampler import Sampler
from specdec.tree.growth import TreeShape
from tests.specdec.proposers.feature_proposers import make_drafter
from tests.specdec.proposers.made_up_states import VOCAB, MadeUpSource

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
            DraftChoice(sampler=sampler, vocab_size=VOCAB),
            shape,
            reading=DraftReading(prefix_caching=False),
            idle_work=(steps,),
            name=kind,
            states=states,
            generating=runner,
        )
    loop = runner.record_loop(
        CONFIG, vocab_size=VOCAB, num_draft_tokens=6, max_num_seqs=4, stream="target", recorder=recorder
    )
    return DraftModelProposer(
        runner,
        DraftChoice(sampler=sampler, vocab_size=VOCAB),
        reading=DraftReading(prefix_caching=False),
        fused_loop=loop,
        idle_work=(loop, steps),
        name=kind,
        states=states,
    )


def recorded(proposer: Proposer) -> Proposer:
    for work in idle_work_of(proposer):
        while work.pending():
            work.run_next()
        assert work.state == "ready"
    return proposer
