"""EAGLE, EAGLE-3, MTP, Medusa and Hydra as real CUDA graphs: what they draft eagerly."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.model.config import CompileConfig
from specdec.proposers.head_graph import GraphedHeads, HeadStart
from specdec.proposers.heads import Heads
from specdec.sampling.sampler import Sampler
from specdec.sampling.sequence_sampling import SequenceSampling
from specdec.tree.growth import TreeShape
from tests.specdec.proposers import feature_proposers, head_proposers
from tests.specdec.proposers.graphed_drafters import make_graphed, recorded
from tests.specdec.proposers.made_up_states import VOCAB
from tests.specdec.proposers.proposing_rounds import PARAMS, drafted

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [None, feature_proposers.STATIC, feature_proposers.DYNAMIC])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "eagle3.1", "mtp"])
def test_drafters_of_features(kind: str, shape: TreeShape | None) -> None:
    expected = drafted(make_graphed(kind, None, shape, "cuda"), seed=1)
    assert drafted(recorded(make_graphed(kind, None, shape, "cuda")), seed=1) == expected


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_of_a_depth_each(kind: str) -> None:
    heads: Heads = copy.deepcopy(head_proposers.make_heads(kind)).to("cuda")
    ends: dict[str, Any] = {
        name: getattr(heads.target, name).to("cuda") for name in ("embeddings", "final_norm", "head")
    }
    heads.target = replace(heads.target, **ends)
    loop = GraphedHeads(
        heads, CompileConfig(), name=kind, vocab_size=VOCAB, num_draft_tokens=4, max_num_seqs=4
    )
    assert loop.warm_up() == "ready"
    generator = torch.Generator().manual_seed(3)
    for number in range(5):
        rows = torch.randn(3, heads.prepared_size, generator=generator).cuda()
        starts = [
            HeadStart(3 + index, SequenceSampling(params, index), 9, 4) for index, params in enumerate(PARAMS)
        ]
        count = 1 + number % 3
        chains = loop.try_draft(rows[:count], starts[:count])
        assert chains is not None
        for row, start, chain in zip(rows, starts, chains, strict=False):
            assert chain == eager_chain(heads, row[None], start), number


def eager_chain(heads: Heads, row: torch.Tensor, start: HeadStart) -> list[int]:
    """Draft one chain depth by depth."""
    from specdec.drafters.base import SequentialHeads
    from specdec.sampling.rows import RowSpec, SamplingRows

    chain: list[int] = []
    with torch.inference_mode():
        for depth in range(min(start.budget, heads.max_depth)):
            inputs = row
            if isinstance(heads, SequentialHeads):
                inputs = heads.inputs(row, torch.tensor([[start.last_token_id, *chain]], device="cuda"))
            rows = SamplingRows.build([RowSpec(*start.sampling, start.position + depth, 1)], row.device)
            sampled = Sampler().sample(heads.head(depth, inputs)[:, :VOCAB].float(), rows, "target")
            chain.append(int(sampled.token_ids[0]))
    return chain
