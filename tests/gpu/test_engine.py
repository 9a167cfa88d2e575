"""The whole engine on GPUs, in fp32: tokens of transformers' `generate`, whatever drafts, over ranks too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_graph import GraphedDraftLoop
from specdec.proposers.draft_loop import ChainStart
from specdec.scheduling.config import SchedulerConfig
from tests.architectures import save_model

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
PROMPTS = [[(7 * index + 3 * step) % 100 + 2 for step in range(3 + 9 * index)] for index in range(5)]
PROMPTS.append([5, 9, 23, 5, 9, 23, 5, 9])
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.9, top_k=50, top_p=0.95, max_tokens=NUM_TOKENS, ignore_eos=True, seed=7
)
ARCHITECTURES = ("llama", "gemma2", "mistral", "qwen3", "gpt2", "falcon", "qwen3_moe")


class Folders:
    """A target, and a draft model with other weights."""

    def __init__(self, root: Path, architecture: str) -> None:
        self.target, self.draft = root / "target", root / "draft"
        self.reference = save_model(self.target, architecture)
        save_model(self.draft, architecture, 1)

    def config(self, drafter: str, size: int = 1, **target: Any) -> EngineConfig:
        speculative: dict[str, Any] = {"method": drafter, "cache": CacheConfig(num_blocks=200, block_size=4)}
        if drafter == "draft_model":
            speculative |= {"model": str(self.draft), "device": "cuda"}
        if drafter == "self":
            kv = {"policy": "streaming", "budget": 12, "sink_tokens": 4, "floor": 12}
            speculative = {"method": drafter, "kv": kv}
        if drafter == "layerskip":
            speculative = {"method": drafter, "exit_layer": 1}
        compile_config = CompileConfig(cuda_graph_max_rows=32)
        return EngineConfig(
            target=ModelConfig(
                model=str(self.target),
                dtype="float32",
                device="cuda",
                tensor_parallel_size=size,
                compile=compile_config,
                **target,
            ),
            speculative_config=SpeculativeConfig.model_validate(
                {"controller": "fixed", **speculative, "compile": compile_config}
            ),
            cache=CacheConfig(num_blocks=80, block_size=4),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=40),
        )

    def generated(self, prompt: list[int]) -> list[int]:
        model: Any = self.reference.to("cuda")
        output = model.generate(
            torch.tensor([prompt], device="cuda"),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device="cuda"),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        return list(output[0, len(prompt) :].tolist())


def run(config: EngineConfig, params: SamplingParams) -> list[list[int]]:
    with Engine(config) as engine:
        engine.warm_up()
        return [list(result.token_ids) for result in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_those_of_generate(tmp_path: Path, architecture: str) -> None:
    folders = Folders(tmp_path, architecture)
    expected = [folders.generated(prompt) for prompt in PROMPTS]
    for drafter in ("none", "ngram", "draft_model", "self"):
        assert run(folders.config(drafter), GREEDY) == expected


def test_sampled_tokens_do_not_depend_on_the_drafter_nor_on_the_attention(tmp_path: Path) -> None:
    folders = Folders(tmp_path, "llama")
    expected = run(folders.config("none", attention_backend="sdpa"), SAMPLED)
    for drafter in ("none", "draft_model", "self", "layerskip"):
        assert run(folders.config(drafter), SAMPLED) == expected


def test_a_target_drafts_for_itself_in_recorded_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted: list[int] = []
    try_draft = GraphedDraftLoop.try_draft

    def watched(self: GraphedDraftLoop, starts: Sequence[ChainStart]) -> list[list[int]] | None:
        chains = try_draft(self, starts)
        drafted.append(-1 if chains is None else sum(map(len, chains)))
        return chains

    monkeypatch.setattr(GraphedDraftLoop, "try_draft", watched)
    run(Folders(tmp_path, "llama").config("self"), SAMPLED)
    assert sum(drafted) > NUM_TOKENS
    assert -1 not in drafted


def test_the_tokens_of_a_cpu(tmp_path: Path) -> None:
    folders = Folders(tmp_path, "llama")
    config = folders.config("none")
    on_cpu = config.model_copy(update={"target": config.target.model_copy(update={"device": "cpu"})})
    assert run(config, SAMPLED) == run(on_cpu, SAMPLED)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_two_ranks_over_nccl(tmp_path: Path, architecture: str) -> None:
    folders = Folders(tmp_path, architecture)
    expected = [folders.generated(prompt) for prompt in PROMPTS]
    assert run(folders.config("ngram", size=2), GREEDY) == expected
