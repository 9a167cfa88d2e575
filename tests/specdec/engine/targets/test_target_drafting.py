"""A drafter in the target's process that reads its hidden states: whatever it drafts, the stream stays.

That it is shown the right states, of the right tokens, is seen by comparing what it was shown with what
transformers says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
import torch

from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, TargetStep, TargetWork
from specdec.core.proposal import Proposal
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.engine import Engine
from specdec.engine.metrics.engine_metrics import EngineMetrics
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
from tests.specdec.engine.linear_heads import CAPABILITIES, LAYERS, LinearHeads, Seen, fit_heads, hidden_of
from tests.specdec.engine.test_identity import NUM_TOKENS, SAMPLING, SHAPING, Models, Setting, ragged_prompts

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
KINDS = {"greedy": GREEDY, **SAMPLING, **SHAPING}
PROMPTS = ragged_prompts(8, seed=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


class Bench:
    """Heads, and what the target says alone; made once."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._heads: dict[str, torch.Tensor] = {}
        self._alone: dict[tuple[str, str], list[tuple[int, ...]]] = {}

    def heads(self, architecture: str) -> torch.Tensor:
        if architecture not in self._heads:
            self._heads[architecture] = self.fitted(architecture, LAYERS)
        return self._heads[architecture]

    def fitted(self, architecture: str, layers: Sequence[int]) -> torch.Tensor:
        texts = [
            [*prompt, *stream]
            for kind in ("greedy", "plain")
            for prompt, stream in zip(PROMPTS, self.alone(architecture, kind), strict=True)
        ]
        return fit_heads(self.models.reference(architecture), texts, num_heads=5, layers=layers)

    def alone(self, architecture: str, kind: str) -> list[tuple[int, ...]]:
        key = (architecture, kind)
        if key not in self._alone:
            with Setting("none", batch=1).engine(self.models, architecture) as engine:
                self._alone[key] = [engine.generate([one], KINDS[kind])[0].token_ids for one in PROMPTS]
        return self._alone[key]


@pytest.fixture(scope="module")
def bench(models: Models) -> Bench:
    return Bench(models)


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


def check(
    bench: Bench, setting: HeadSetting, kind: str, architecture: str = "llama"
) -> tuple[EngineMetrics, Sequence[Seen]]:
    expected = bench.alone(architecture, kind)
    engine, drafter = setting.serving(bench, architecture)
    with engine:
        results = engine.generate(PROMPTS[: setting.batch], KINDS[kind])
        engine.check_integrity()
        metrics = engine.metrics()
    for result, stream in zip(results, expected, strict=False):
        assert result.token_ids == stream
    check_seen(bench, drafter.seen, architecture)
    return metrics, drafter.seen


def check_seen(bench: Bench, seen: Sequence[Seen], architecture: str = "llama") -> None:
    """Every row that the drafter was shown is the state that transformers has of that token."""
    assert seen
    reference = bench.models.reference(architecture)
    for token_ids, rows, _ in seen[:: max(1, len(seen) // 30)]:
        expected = hidden_of(reference, token_ids)[:-1]
        assert rows.shape == expected.shape
        scale = float(expected.abs().max())
        torch.testing.assert_close(rows.float(), expected, rtol=0, atol=5e-5 * scale)


COVER = [
    ("greedy", HeadSetting(num_draft_tokens=1, batch=1)),
    ("greedy", HeadSetting(num_draft_tokens=5, batch=8, chunk=16, num_blocks=18)),
    ("greedy", HeadSetting(num_draft_tokens=4, batch=5, chunk=9, compiled=True)),
    ("plain", HeadSetting(num_draft_tokens=4, batch=8, chunk=16, num_blocks=18, compiled=True)),
    ("cut", HeadSetting(num_draft_tokens=5, batch=5, chunk=9)),
    ("penalties", HeadSetting(num_draft_tokens=4, batch=8, chunk=16, num_blocks=18)),
    ("bad words", HeadSetting(num_draft_tokens=3, batch=5, compiled=True)),
    ("greedy", HeadSetting(num_draft_tokens=10, batch=8, chunk=32, num_blocks=24, tree=True)),
    ("plain", HeadSetting(num_draft_tokens=7, batch=5, chunk=40, tree=True, compiled=True)),
    ("penalties", HeadSetting(num_draft_tokens=10, batch=3, tree=True)),
]


@pytest.mark.cover(1, "kind", "setting.compiled", "setting.tree", "setting.num_blocks")
@pytest.mark.parametrize(("kind", "setting"), COVER, ids=str)
def test_says_what_it_says_alone(bench: Bench, kind: str, setting: HeadSetting) -> None:
    metrics, _ = check(bench, setting, kind)
    assert metrics.num_draft_tokens > 0
    assert metrics.num_accepted_tokens > 0
    if setting.num_blocks < 30:
        assert metrics.num_preemptions > 0


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "chunk", "num_blocks"), [(1, 512, 200), (8, 16, 18), (5, 9, 200)])
@pytest.mark.parametrize("compiled", [False, True])
def test_says_what_it_says_alone_in_every_setting(
    bench: Bench, kind: str, batch: int, chunk: int, num_blocks: int, compiled: bool
) -> None:
    setting = HeadSetting(batch=batch, chunk=chunk, num_blocks=num_blocks, compiled=compiled)
    check(bench, setting, kind)


@pytest.mark.parametrize(
    "architecture", ["gpt2", *(pytest.param(one, marks=pytest.mark.full) for one in ("gemma3", "mixtral"))]
)
def test_every_kind_of_model(bench: Bench, architecture: str) -> None:
    metrics, _ = check(bench, HeadSetting(batch=8, chunk=16, num_blocks=18), "greedy", architecture)
    assert metrics.num_accepted_tokens > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cached_prefix_has_its_rows(bench: Bench, compiled: bool) -> None:
    """What is not computed again is there all the same, for sequences that have never computed it."""
    prompt = PROMPTS[6]
    longer = (*prompt, 17, 23, 5)
    engine, drafter = HeadSetting(compiled=compiled).serving(bench, "llama")
    with engine:
        engine.generate([prompt], GREEDY)
        before = engine.metrics().prefix_cache_hits
        del drafter.seen[:]
        engine.generate([prompt, longer], GREEDY)
        assert engine.metrics().prefix_cache_hits - before >= 2 * (len(prompt) // 4 * 4 - 4)
    assert {one.token_ids[: len(prompt)] for one in drafter.seen} == {prompt}
    check_seen(bench, drafter.seen)


def test_rows_of_rejected_drafts_are_overwritten(bench: Bench) -> None:
    """Negative control of the comparison, too."""
    setting = HeadSetting(num_draft_tokens=5, batch=4)
    metrics, seen = check(bench, setting, "hot")
    assert metrics.num_missing_proposals == 0
    assert metrics.num_accepted_tokens < metrics.num_draft_tokens - 20
    shifted = Seen(seen[-1].token_ids, seen[-1].rows.roll(1, 0), ())
    with pytest.raises(AssertionError):
        check_seen(bench, [shifted])


def test_proposals_that_do_not_fit_are_dropped_and_counted(bench: Bench) -> None:
    spoilt: list[dict[str, Any]] = [
        {"committed_len": 1},
        {"prefix_hash": 1},
        {"token_ids": (1,) * 9},
        {"token_ids": (1, 128)},
        {"token_ids": (1, 2), "parents": (0, 0)},
    ]
    for fields in spoilt:

        class Spoilt(LinearHeads):
            def propose(
                self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
            ) -> dict[RequestId, Proposal]:
                made = super().propose(sequences, num_draft_tokens)
                return {name: msgspec.structs.replace(one, **fields) for name, one in made.items()}  # noqa: B023

        engine, drafter = HeadSetting().serving(bench, "llama", Spoilt)
        with engine:
            results = engine.generate(PROMPTS[:4], GREEDY)
            metrics = engine.metrics()
        assert [one.token_ids for one in results] == bench.alone("llama", "greedy")[:4]
        assert drafter.seen
        assert metrics.num_draft_tokens == 0
        assert metrics.num_missing_proposals > 0


def test_what_is_kept_of_a_sequence_goes_with_it(bench: Bench) -> None:
    target = LocalTarget(
        HeadSetting().runner(bench.models.load("llama"), 20),
        HeadSetting().sampler(),
        make_drafter=lambda source: LinearHeads(source, bench.heads("llama")),
    )
    assert target.hidden is not None
    name = RequestId("r")
    admitted = AdmittedSequence(name, 1, GREEDY, num_prompt_tokens=3, token_ids=(5, 6, 7))
    work = TargetWork(name, (5, 6, 7), start=0, num_sampled_rows=1, table_start=0, block_ids=(3, 4))
    target.run(TargetStep(step_id=0, works=(work,), admitted=(admitted,)))
    rows = target.hidden.hidden_rows(name, 0, 3)
    assert rows is not None
    assert rows.shape == (3, 64)
    assert target.hidden.hidden_rows(name, 0, 4) is None, "not computed yet"
    assert target.hidden.hidden_rows(RequestId("other"), 0, 1) is None
    again = msgspec.structs.replace(work, start=1, token_ids=(6,), table_start=2, block_ids=())
    target.run(TargetStep(step_id=1, works=(again,)))
    assert target.hidden.hidden_rows(name, 0, 3) is None, "the newest computation counts"
    target.run(TargetStep(step_id=2, works=(), released=(name,)))
    assert target.hidden.hidden_rows(name, 0, 1) is None
    assert target.hidden.num_sequences == 0
    target.close()
