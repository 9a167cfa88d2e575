"""A draft model over several ranks looks ahead as it drafts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.engine.build_drafter import build_draft_grammars, build_draft_part
from specdec.engine.config import EngineConfig
from specdec.engine.ranks.follower import follow_drafter
from specdec.engine.ranks.leader import LeadingProposer
from specdec.model.config import CompileConfig, ModelConfig
from specdec.model.parallel.group import RankGroup
from specdec.proposers.base import AheadWish, LooksAhead, ReadsAlong
from specdec.proposers.config import SpeculativeConfig
from tests.architectures import VOCAB_SIZE, save_model
from tests.rank_pool import Pools
from tests.specdec.proposers.ahead_contract import Stream, assumed_of

PARAMS = (
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(temperature=0.9, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=5, repetition_penalty=1.3, ignore_eos=True),
)
NUM_ROUNDS = 5


def config_of(folder: Path, size: int) -> EngineConfig:
    return EngineConfig(
        target=ModelConfig(model=str(folder), dtype="float32", compile=CompileConfig(mode="off")),
        speculative_config=SpeculativeConfig.model_validate(
            {
                "method": "draft_model",
                "model": str(folder),
                "dtype": "float32",
                "draft_tensor_parallel_size": size,
                "compile": {"mode": "off"},
                "cache": {"num_blocks": 400, "block_size": 4},
            }
        ),
    )


def look_ahead(group: RankGroup, folder: Path) -> tuple[int, int, int]:
    """Return how many branches there were, how many turned out true, and blocks held at the end."""
    config = config_of(folder, group.size)
    part = build_draft_part(config, group)
    if group.rank > 0:
        grammars = build_draft_grammars(config)
        follow_drafter(part, group, grammars)
        grammars.close()
    else:
        proposer = LeadingProposer(part, group)
        assert isinstance(proposer, LooksAhead)
        assert isinstance(proposer, ReadsAlong), "who waits for it has to know how much it has yet to read"
        run_rounds(proposer)
        proposer.close()
    part.check_integrity()
    counters = part.counters
    num_held = part.sequences.num_held_blocks
    return counters["draft_ahead_branches"], counters["draft_ahead_branches_true"], num_held


def run_rounds(proposer: LeadingProposer) -> None:
    rng = random.Random(4)
    streams = [
        Stream(f"r{index}", rng.choices(range(VOCAB_SIZE), k=5 + index), params, 17 + index, 2)
        for index, params in enumerate(PARAMS)
    ]
    for _ in range(NUM_ROUNDS):
        wishes = [
            AheadWish(
                view=stream.view(),
                pending=stream.pending,
                num_draft_tokens=3,
                fan_out=(1,) * len(stream.pending) + (2,),
            )
            for stream in streams
        ]
        answers = proposer.propose_ahead(wishes)
        for stream in streams:
            proposals = answers[RequestId(stream.name)]
            assert len(proposals) == len(stream.pending) + 2
            for proposal in proposals:
                check(proposer, stream, proposal)
            chosen = rng.choice(proposals)
            stream.token_ids += assumed_of(chosen, stream.view(), stream.pending, VOCAB_SIZE)
            stream.pending = chosen.token_ids


def check(proposer: LeadingProposer, stream: Stream, proposal: Proposal) -> None:
    """Compare with an ordinary draft of the same ranks."""
    assumed = assumed_of(proposal, stream.view(), stream.pending, VOCAB_SIZE)
    name, stream.name = stream.name, "fresh"
    one = stream.view(assumed)
    stream.name = name
    assert proposer.propose([one], {one.request_id: 3})[one.request_id].token_ids == proposal.token_ids
    proposer.release([one.request_id])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_branches_are_those_of_all_ranks(rank_pool: Pools, tmp_path: Path, size: int) -> None:
    save_model(tmp_path, "llama")
    num_branches = len(PARAMS) * (2 + (NUM_ROUNDS - 1) * 5)
    expected = (num_branches, len(PARAMS) * (NUM_ROUNDS - 1), 0)
    assert rank_pool(size).run(look_ahead, tmp_path) == [expected] * size
