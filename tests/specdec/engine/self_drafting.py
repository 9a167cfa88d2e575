"""Engines whose target drafts for itself with a part of its K/V, and that nothing of it shows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.metrics.engine_metrics import EngineMetrics
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.text.tokenizer import HuggingFaceTokenizer
from specdec.kv.selection import KvPolicyName, KvSelectionConfig
from specdec.proposers.self_speculation import SelfSpeculation
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from specdec.tree.growth import TreeShape
from specdec.tree.static import StaticTree
from tests.architectures import make_tokenizer
from tests.specdec.engine.identity_settings import Setting
from tests.specdec.engine.sampling_kinds import KINDS
from tests.specdec.engine.tiny_models import PROMPTS, Models

BLOCK_SIZE = 4
FULL = KvSelectionConfig(policy="full")


def selecting(
    policy: KvPolicyName, budget: int | float = 12, *, sink: int = 4, every: int | None = None
) -> KvSelectionConfig:
    return KvSelectionConfig(policy=policy, budget=budget, sink_tokens=sink, floor=12, rescore_every=every)


streaming = partial(selecting, "streaming")
SCORED: tuple[KvPolicyName, ...] = ("snapkv", "verified")
BUSHY = StaticTree.of_widths((3, 1, 1), (0.5, 0.3, 0.1))


@dataclass(frozen=True)
class SelfSetting(Setting):
    kv: KvSelectionConfig = FULL
    tree: TreeShape | None = None

    def engine(self, models: Models, architecture: str) -> Engine:
        runner = self.runner(models.load(architecture), self.num_blocks)
        return Engine.from_parts(
            target=LocalTarget(
                runner, self.sampler(), self_drafting=self.kv.make(BLOCK_SIZE), self_tree=self.tree
            ),
            proposer=SelfSpeculation(tree=self.tree),
            tokenizer=HuggingFaceTokenizer(make_tokenizer()),
            scheduler=SchedulerConfig(
                max_num_seqs=min(self.batch, self.chunk), max_num_batched_tokens=self.chunk
            ),
            controller=FixedController(self.num_draft_tokens),
        )


class Streams:
    """What the target says alone; computed once for each prompt and parameters."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._known: dict[tuple[str, str], list[tuple[int, ...]]] = {}

    def alone(self, architecture: str, kind: str, params: SamplingParams) -> list[tuple[int, ...]]:
        key = (architecture, kind)
        if key not in self._known:
            with Setting("none", batch=1).engine(self._models, architecture) as engine:
                self._known[key] = [engine.generate([one], params)[0].token_ids for one in PROMPTS]
        return self._known[key]


def check(
    models: Models, streams: Streams, setting: SelfSetting, kind: str, architecture: str = "llama"
) -> EngineMetrics:
    expected = streams.alone(architecture, kind, KINDS[kind])
    prompts = PROMPTS[: setting.batch]
    with setting.engine(models, architecture) as engine:
        results = engine.generate(prompts, KINDS[kind])
        engine.check_integrity()
        metrics = engine.metrics()
    for result, stream in zip(results, expected, strict=False):
        assert result.token_ids == stream
    return metrics
