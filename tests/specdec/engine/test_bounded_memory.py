"""What a draft model of bounded memory takes, as its configuration sizes it, however long texts are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.build import build_parts, draft_bytes
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.profiling.drafts import MadeUpSequence
from specdec.engine.targets.local_target import LocalTarget
from specdec.model.runner import ModelRunner
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_model_factory import load_draft_model
from specdec.proposers.draft_window import draft_window
from specdec.proposers.target_facts import TargetFacts

pytestmark = pytest.mark.usefixtures("one_thread")
DEMO = Path(__file__).parents[3] / "models" / "demo"
STREAMING = {"policy": "streaming", "budget": 64}
NUM_REQUESTS = 32
K = 4


def speculative(**settings: Any) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate(
        {
            "method": "draft_model",
            "model": str(DEMO / "draft"),
            "num_speculative_tokens": K,
            "controller": "fixed",
            "compile": {"mode": "off"},
            **settings,
        }
    )


def load(config: SpeculativeConfig) -> DraftModelProposer:
    return load_draft_model(config, TargetFacts(vocab_size=4096, dtype="bfloat16", max_num_seqs=NUM_REQUESTS))


def runner_of(proposer: DraftModelProposer) -> ModelRunner:
    assert isinstance(proposer.runner, ModelRunner)
    return proposer.runner


def draft_of_length(folder: Path, max_position_embeddings: int) -> str:
    shutil.copytree(DEMO / "draft", folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = max_position_embeddings
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_the_pool_does_not_depend_on_how_long_texts_may_become(tmp_path: Path) -> None:
    """As many bytes for 32 requests of 32k tokens as for 32 of 512."""
    memory = {"memory_bytes": 1 << 30}
    sizes: dict[tuple[str, int], int] = {}
    for length in (512, 32768):
        folder = draft_of_length(tmp_path / f"{length}", length)
        for policy in ("streaming", "full"):
            kv = STREAMING if policy == "streaming" else {}
            proposer = load(speculative(model=folder, kv=kv, cache=memory))
            assert proposer.capabilities.max_context == length
            sizes[policy, length] = runner_of(proposer).pool.num_bytes
            proposer.close()
    assert sizes["streaming", 512] == sizes["streaming", 32768]
    assert sizes["streaming", 32768] < sizes["full", 512]
    assert sizes["full", 32768] == pytest.approx(64 * sizes["full", 512], rel=0.01), "the control"


def test_a_pool_smaller_than_a_window_is_told(caplog: pytest.LogCaptureFixture) -> None:
    for memory_bytes in (1 << 16, 1 << 22):
        caplog.clear()
        load(speculative(kv=STREAMING, cache={"memory_bytes": memory_bytes})).close()
        said = [one.getMessage() for one in caplog.records if "kv.budget: 64" in one.getMessage()]
        assert len(said) == (memory_bytes == 1 << 16)
        assert all("speculative_config.cache.memory_bytes: 65536 makes a pool of" in one for one in said)


def most_held(length: int) -> int:
    """Read 32 texts and draft behind them; return the most bytes of the pool that were held."""
    proposer = load(speculative(kv=STREAMING))
    runner = runner_of(proposer)
    generator = np.random.default_rng(0)
    views = [
        MadeUpSequence(f"r{number}", length, cache_salt="x", vocab_size=4096, generator=generator)
        for number in range(NUM_REQUESTS)
    ]
    wanted = {RequestId(f"r{number}"): K for number in range(NUM_REQUESTS)}
    most, num_drafted = 0, dict.fromkeys(wanted, 0)
    while min(num_drafted.values()) < 2:
        drafted = proposer.propose(views, wanted)
        most = max(most, proposer.sequences.num_held_blocks)
        for one in views:
            if one.request_id in drafted:
                num_drafted[one.request_id] += 1
                one.grow(K)
    proposer.check_integrity()
    assert not proposer.crowded_out
    proposer.close()
    return most * runner.pool.num_bytes // runner.num_blocks


@pytest.mark.full
def test_32_long_texts_take_what_32_short_ones_take() -> None:
    short, long = most_held(192), most_held(1200)
    assert 0 < long <= short


def test_what_is_allocated_stays_within_the_plan() -> None:
    """Prompts of ten times the window, all at once, in pools that were sized beforehand."""
    config = EngineConfig.model_validate(
        {
            "target": {"model": str(DEMO / "target"), "dtype": "bfloat16", "compile": {"mode": "off"}},
            "speculative_config": speculative(kv=STREAMING, cache={"memory_bytes": 2 << 20}),
            "cache": {"memory_bytes": 32 << 20},
            "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 256},
        }
    )
    parts = build_parts(config)
    assert isinstance(parts.target, LocalTarget)
    assert isinstance(parts.proposer, DraftModelProposer)
    draft = runner_of(parts.proposer)
    assert parts.target.runner.pool.num_bytes <= 32 << 20
    weights = sum(parameter.nbytes for parameter in draft.loaded.model.parameters())
    assert draft.pool.num_bytes + weights <= draft_bytes(config.speculative_config)
    engine = Engine.from_parts(
        target=parts.target,
        proposer=parts.proposer,
        tokenizer=parts.tokenizer,
        scheduler=parts.scheduler,
        controller=parts.controller,
        prefix_caching=parts.prefix_caching,
    )
    generator = np.random.default_rng(1)
    prompts = [tuple(generator.integers(3, 4000, size=640).tolist()) for _ in range(4)]
    window = draft_window(config.speculative_config)
    assert window is not None
    with engine:
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        for seed, prompt in enumerate(prompts):
            name = RequestId(f"r{seed}")
            engine.add_request(Request(request_id=name, prompt_token_ids=prompt, params=params, seed=seed))
        while engine.has_work:
            engine.step()
            held = parts.proposer.sequences.num_held_blocks
            assert held <= 4 * window.max_blocks(1 << 20, draft.block_size) < draft.num_blocks
        assert engine.metrics().num_draft_tokens > 0
