"""Engines that draft with linear heads beside the target, and whether these saw the right states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from specdec.engine.engine import Engine
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.text.tokenizer import HuggingFaceTokenizer
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig
from specdec.model.graphs import CompiledForward
from specdec.model.loader import LoadedModel
from specdec.model.runner import ModelRunner
from specdec.proposers.at_target import DraftsAtTarget
from specdec.proposers.hidden import HiddenSource
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from tests.architectures import make_tokenizer
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.identity_settings import Setting
from tests.specdec.engine.linear_heads import CAPABILITIES, LAYERS, LinearHeads, Seen, hidden_of


@dataclass(frozen=True)
class HeadSetting(Setting):
    def runner(self, loaded: LoadedModel, num_blocks: int) -> ModelRunner:
        runner = ModelRunner(
            loaded,
            CacheConfig(block_size=4, num_blocks=num_blocks),
            max_num_seqs=32,
            hidden_layers=LAYERS,
        )
        if self.compiled:
            runner.graphs = forward = CompiledForward(runner, CompileConfig())
            if forward.warm_up() != "ready":
                pytest.skip("no compiled forward here")
        return runner

    tree: bool = False

    def serving(
        self, bench: Bench, architecture: str, kind: type[LinearHeads] = LinearHeads
    ) -> tuple[Engine, LinearHeads]:
        runner = self.runner(bench.models.load(architecture), self.num_blocks)
        made: list[LinearHeads] = []
        capabilities = replace(CAPABILITIES, shape="tree") if self.tree else CAPABILITIES

        def make(source: HiddenSource) -> LinearHeads:
            made.append(kind(source, bench.heads(architecture), capabilities))
            return made[0]

        engine = Engine.from_parts(
            target=LocalTarget(runner, self.sampler(), make_drafter=make),
            proposer=DraftsAtTarget(capabilities),
            tokenizer=HuggingFaceTokenizer(make_tokenizer()),
            scheduler=SchedulerConfig(
                max_num_seqs=min(self.batch, self.chunk), max_num_batched_tokens=self.chunk
            ),
            controller=FixedController(self.num_draft_tokens),
        )
        return engine, made[0]


def check_seen(bench: Bench, seen: Sequence[Seen], architecture: str = "llama") -> None:
    """Every row that the drafter was shown is the state that transformers has of that token."""
    assert seen
    reference = bench.models.reference(architecture)
    for token_ids, rows, _ in seen[:: max(1, len(seen) // 30)]:
        expected = hidden_of(reference, token_ids)[:-1]
        assert rows.shape == expected.shape
        scale = float(expected.abs().max())
        torch.testing.assert_close(rows.float(), expected, rtol=0, atol=5e-5 * scale)
