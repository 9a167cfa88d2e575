"""A drafter in the target's process that reads its hidden states: whatever it drafts, the stream stays.

That it is shown the right states, of the right tokens, is seen by comparing what it was shown with what
transformers says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest

from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, TargetStep, TargetWork
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.engine.metrics.engine_metrics import EngineMetrics
from specdec.engine.targets.local_target import LocalTarget
from tests.specdec.engine.drafter_bench import Bench
from tests.specdec.engine.linear_head_engines import HeadSetting, check_seen
from tests.specdec.engine.linear_heads import LinearHeads, Seen
from tests.specdec.engine.sampling_kinds import GREEDY, KINDS
from tests.specdec.engine.tiny_models import PROMPTS, Models

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def bench(models: Models) -> Bench:
    return Bench(models)


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
