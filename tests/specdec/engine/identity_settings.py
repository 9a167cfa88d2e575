"""What must not show in the output of an engine (drafter, batch, chunks, room), and that it does not."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.text.tokenizer import HuggingFaceTokenizer
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import LoadedModel
from specdec.model.runner import ModelRunner
from specdec.proposers.base import Proposer
from specdec.proposers.corpus import Corpus
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_loop import NativeDraftLoop
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.lookup_config import RetrievalConfig, SuffixConfig
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.none import NoProposer
from specdec.proposers.retrieval import RetrievalProposer
from specdec.proposers.suffix import SuffixProposer
from specdec.sampling.sampler import Sampler
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from tests.architectures import ARCHITECTURES, VOCAB_SIZE, make_tokenizer
from tests.specdec.engine.tiny_models import NUM_TOKENS, Models, ragged_prompts


@dataclass(frozen=True)
class Setting:
    """What must not show in the output."""

    drafter: str = "none"
    num_draft_tokens: int = 4
    batch: int = 4
    chunk: int = 512
    """max_num_batched_tokens"""
    num_blocks: int = 200
    """Of 4 tokens; 24 make any two of the longer prompts preempt each other."""
    compiled: bool = False
    """Forwards and token function compiled: rounds and chains of drafts are single native calls."""

    def engine(self, models: Models, architecture: str) -> Engine:
        runner = self.runner(models.load(architecture), self.num_blocks)
        return Engine.from_parts(
            target=LocalTarget(runner, self.sampler()),
            proposer=self.proposer(models, architecture),
            tokenizer=HuggingFaceTokenizer(make_tokenizer()),
            scheduler=SchedulerConfig(
                max_num_seqs=min(self.batch, self.chunk), max_num_batched_tokens=self.chunk
            ),
            controller=FixedController(self.num_draft_tokens),
        )

    def proposer(self, models: Models, architecture: str) -> Proposer:
        if self.drafter == "none":
            return NoProposer()
        if self.drafter == "ngram":
            return NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3)
        if self.drafter in ("suffix", "suffix tree"):
            shape: Any = "tree" if self.drafter == "suffix tree" else "chain"
            return SuffixProposer(SuffixConfig(shape=shape, max_spec_factor=4.0))
        if self.drafter == "retrieval":
            corpus = Corpus.of_texts(2 * prompt for prompt in ragged_prompts(12))
            return RetrievalProposer(
                RetrievalConfig(path="in memory", shape="tree", min_match_tokens=1), corpus
            )
        same = self.drafter == "same model"
        loaded = models.load(architecture) if same else models.load("llama", 1)
        # The drafter's own pool and reading budget are as tight as the target's.
        runner = self.runner(loaded, self.num_blocks)
        sampler = self.sampler()
        return DraftModelProposer(
            runner,
            DraftChoice(sampler=sampler, vocab_size=VOCAB_SIZE, eos_token_ids=loaded.eos_token_ids),
            reading=DraftReading(max_read_tokens=max(self.chunk, 8), rotary=loaded.rotary),
            fused_loop=NativeDraftLoop(runner, sampler, VOCAB_SIZE) if self.compiled else None,
        )

    def runner(self, loaded: LoadedModel, num_blocks: int) -> ModelRunner:
        runner = ModelRunner(loaded, CacheConfig(block_size=4, num_blocks=num_blocks), max_num_seqs=32)
        if self.compiled:
            runner.graphs = forward = CompiledForward(runner, CompileConfig())
            if forward.warm_up() != "ready":
                pytest.skip("no compiled forward here")
        return runner

    def sampler(self) -> Sampler:
        sampler = Sampler()
        if self.compiled:
            sampler.warm_up()
        return sampler


def check_greedy(models: Models, architecture: str, setting: Setting) -> Engine:
    prompts = ragged_prompts(setting.batch)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    with setting.engine(models, architecture) as engine:
        for result in engine.generate(prompts, params):
            assert list(result.token_ids) == models.greedy(architecture, tuple(result.prompt_token_ids))
        engine.check_integrity()
    return engine


def taking_turns(
    architectures: Sequence[str], settings: Sequence[Setting], always: Container[str] = ARCHITECTURES
) -> list[Any]:
    """Every pair; by default every setting with half of the architectures that `always` run, and the other
    way around.
    """
    return [
        pytest.param(
            architecture,
            setting,
            marks=[] if architecture in always and (one + other) % 2 == 0 else [pytest.mark.full],
        )
        for one, architecture in enumerate(architectures)
        for other, setting in enumerate(settings)
    ]


def alone(
    models: Models, architecture: str, prompt: Sequence[int], params: SamplingParams
) -> tuple[int, ...]:
    """The stream of one request that has the engine to itself, without speculation."""
    with Setting("none", batch=1).engine(models, architecture) as engine:
        return engine.generate([prompt], params)[0].token_ids


def check_sampled(models: Models, architecture: str, setting: Setting, params: SamplingParams) -> None:
    prompts = ragged_prompts(setting.batch, seed=1)
    with setting.engine(models, architecture) as engine:
        results = engine.generate(prompts, params)
    for prompt, result in zip(prompts[:4], results, strict=False):
        assert result.token_ids == alone(models, architecture, prompt, params)
