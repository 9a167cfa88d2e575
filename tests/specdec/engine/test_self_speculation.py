"""Self-speculation: whatever part of its K/V the target drafts with, it says what it says alone.

That drafts are right, which exactness does not show, is seen at what is accepted: all of it, where everything
is selected, and much of it, where the window is left.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, get_args

import msgspec
import pydantic
import pytest
import torch

from specdec.core.errors import ConfigError
from specdec.core.ids import RequestId
from specdec.core.plan import AdmittedSequence, TargetResult, TargetStep, TargetWork, WorkResult
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.offline import choice_requests
from specdec.engine.profiling.plan import ProfilePlan
from specdec.engine.profiling.rounds import measure_profile
from specdec.engine.rounds.timed_controller import TimedController
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.targets.remote_target import RemoteTarget
from specdec.engine.targets.self_drafter import SelfDrafter
from specdec.engine.targets.target_server import TargetServer
from specdec.engine.text.tokenizer import HuggingFaceTokenizer
from specdec.kv.config import CacheConfig
from specdec.kv.selection import KvPolicyName, KvSelectionConfig
from specdec.model.batch import PositionShift
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_loop import ChainStart, StepwiseDraftLoop
from specdec.proposers.self_speculation import SelfSpeculation
from specdec.sampling.sampler import RowSpec, SamplingRows, noisy_scores
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController, RoundObservation
from specdec.transport.base import PeerId
from specdec.transport.memory import MemoryNetwork
from specdec.tree.dynamic import DynamicTree
from specdec.tree.entropy import EntropyTree
from specdec.tree.growth import TreeShape
from tests.architectures import CORE_ARCHITECTURES, POSITIONS_OF_OTHER_KINDS, make_tokenizer
from tests.rank_pool import Pools
from tests.specdec.engine import ranked_engines
from tests.specdec.engine.identity_settings import Setting
from tests.specdec.engine.sampling_kinds import GREEDY, KINDS, UNENDING
from tests.specdec.engine.self_drafting import (
    BLOCK_SIZE,
    BUSHY,
    FULL,
    SCORED,
    SelfSetting,
    Streams,
    check,
    selecting,
    streaming,
)
from tests.specdec.engine.target_alone import LONG, draft_once, reference_draft, reference_logits
from tests.specdec.engine.tiny_models import PROMPTS, Models, SharpModels, ragged_prompts
from tests.specdec.engine.toy_engines import tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")
EVERYTHING = KvSelectionConfig(policy="streaming", budget=4096)
SELECTIONS = (
    FULL,
    streaming(12),
    streaming(16, sink=0),
    streaming(0.5),
    *(selecting(policy, every=every) for policy in SCORED for every in (None, 4)),
)
"""Of every policy there is."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


SELF_STREAMING = {"method": "self", "kv": {"policy": "streaming", "budget": 16, "sink_tokens": 4}}
DYNAMIC = DynamicTree(top_k=3, depth=4)
ENTROPY = EntropyTree(top_k=3, depth=5, least_confidence=0.02)


@pytest.fixture(scope="module")
def streams(models: Models) -> Streams:
    return Streams(models)


COVER = [
    ("greedy", SelfSetting(num_draft_tokens=1, batch=1, kv=FULL)),
    ("greedy", SelfSetting(num_draft_tokens=4, batch=8, chunk=16, num_blocks=18, kv=streaming(12))),
    ("greedy", SelfSetting(num_draft_tokens=7, batch=5, chunk=9, kv=streaming(16, sink=0), compiled=True)),
    ("plain", SelfSetting(num_draft_tokens=4, batch=8, chunk=9, num_blocks=18, kv=FULL)),
    ("plain", SelfSetting(num_draft_tokens=1, batch=5, num_blocks=18, kv=streaming(0.5), compiled=True)),
    ("plain", SelfSetting(num_draft_tokens=7, batch=1, chunk=16, kv=streaming(12))),
    ("cut", SelfSetting(num_draft_tokens=7, batch=8, chunk=16, num_blocks=18, kv=streaming(0.3, sink=8))),
    ("cut", SelfSetting(num_draft_tokens=4, batch=5, kv=streaming(12), compiled=True)),
    ("hot", SelfSetting(num_draft_tokens=1, batch=8, chunk=16, kv=streaming(16, sink=0))),
    ("hot", SelfSetting(num_draft_tokens=4, batch=1, chunk=9, kv=streaming(0.5), compiled=True)),
    ("penalties", SelfSetting(num_draft_tokens=4, batch=8, chunk=16, num_blocks=18, kv=streaming(12))),
    ("greedy penalties", SelfSetting(num_draft_tokens=3, batch=3, kv=streaming(12), compiled=True)),
    ("bad words", SelfSetting(num_draft_tokens=6, batch=5, kv=streaming(0.5))),
    ("min tokens", SelfSetting(num_draft_tokens=5, batch=4, kv=FULL, num_blocks=40)),
    ("allowed", SelfSetting(num_draft_tokens=7, batch=2, kv=streaming(12))),
    (
        "greedy",
        SelfSetting(num_draft_tokens=9, batch=8, chunk=32, num_blocks=22, kv=streaming(12), tree=BUSHY),
    ),
    ("plain", SelfSetting(num_draft_tokens=9, batch=4, chunk=80, kv=FULL, tree=BUSHY, compiled=True)),
    (
        "penalties",
        SelfSetting(num_draft_tokens=9, batch=4, chunk=80, kv=selecting("verified", every=4), tree=BUSHY),
    ),
    ("plain", SelfSetting(num_draft_tokens=7, batch=4, chunk=80, kv=FULL, tree=DYNAMIC, compiled=True)),
    (
        "cut",
        SelfSetting(num_draft_tokens=7, batch=8, chunk=32, num_blocks=22, kv=streaming(12), tree=ENTROPY),
    ),
]


@pytest.mark.cover(1, "kind", "setting.compiled", "setting.kv", "setting.num_blocks")
@pytest.mark.parametrize(("kind", "setting"), COVER, ids=str)
def test_says_what_it_says_alone(models: Models, streams: Streams, kind: str, setting: SelfSetting) -> None:
    metrics = check(models, streams, setting, kind)
    assert metrics.num_draft_tokens > 0
    if setting.num_blocks == 18 and setting.chunk == 16:
        assert metrics.num_preemptions > 0


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv", SELECTIONS, ids=str)
@pytest.mark.parametrize("num_draft_tokens", [1, 5])
@pytest.mark.parametrize(("batch", "chunk", "num_blocks"), [(1, 512, 200), (8, 16, 18), (5, 9, 200)])
@pytest.mark.parametrize("compiled", [False, True])
def test_says_what_it_says_alone_in_every_setting(
    models: Models,
    streams: Streams,
    kind: str,
    kv: KvSelectionConfig,
    num_draft_tokens: int,
    batch: int,
    chunk: int,
    num_blocks: int,
    compiled: bool,
) -> None:
    setting = SelfSetting(
        num_draft_tokens=num_draft_tokens,
        batch=batch,
        chunk=chunk,
        num_blocks=num_blocks,
        compiled=compiled,
        kv=kv,
    )
    check(models, streams, setting, kind)


@pytest.mark.cover(1)
@pytest.mark.parametrize("architecture", [*CORE_ARCHITECTURES, *POSITIONS_OF_OTHER_KINDS])
@pytest.mark.parametrize("compiled", [False, True])
def test_every_kind_of_position(models: Models, streams: Streams, architecture: str, compiled: bool) -> None:
    setting = SelfSetting(
        num_draft_tokens=4, batch=8, chunk=16, num_blocks=18, compiled=compiled, kv=streaming(16)
    )
    metrics = check(models, streams, setting, "greedy", architecture)
    assert metrics.num_accepted_tokens > 0


@pytest.mark.cover(1)
@pytest.mark.parametrize("architecture", ["mistral", "gemma3"])
@pytest.mark.parametrize("kv", [streaming(8), selecting("verified", 16)], ids=["streaming", "verified"])
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_whose_windows_reach_beyond_the_gap(
    models: Models, streams: Streams, architecture: str, kv: KvSelectionConfig, compiled: bool
) -> None:
    """Windows of 12 tokens, and fewer behind the gap: drafts see what the target's layers do not."""
    setting = SelfSetting(num_draft_tokens=4, batch=8, compiled=compiled, kv=kv)
    metrics = check(models, streams, setting, "greedy", architecture)
    assert metrics.num_accepted_tokens > 0


def test_every_policy_is_in_the_product() -> None:
    assert {kv.policy for kv in SELECTIONS} == set(get_args(KvPolicyName))


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    "kv", [FULL, EVERYTHING, streaming(1.0)], ids=["full", "large budget", "whole share"]
)
@pytest.mark.parametrize("kind", UNENDING)
@pytest.mark.parametrize("compiled", [False, True])
def test_everything_selected_is_all_accepted(
    models: Models, kind: str, compiled: bool, kv: KvSelectionConfig
) -> None:
    """The draft is then what the target says: nothing of it can be wrong."""
    setting = SelfSetting(num_draft_tokens=5, batch=8, chunk=64, compiled=compiled, kv=kv)
    with setting.engine(models, "llama") as engine:
        engine.generate(PROMPTS, UNENDING[kind])
        metrics = engine.metrics()
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 8 * 10
    assert metrics.method == "self"
    assert metrics.num_missing_proposals == 0


@pytest.mark.parametrize("kind", ["greedy", "plain"])
def test_a_window_is_not_everything(models: Models, kind: str) -> None:
    """The control of the above, and of exactness: drafts are made with less, and are then wrong at times."""
    setting = SelfSetting(num_draft_tokens=5, batch=8, chunk=64, kv=streaming(8, sink=4))
    with setting.engine(models, "llama") as engine:
        engine.generate(PROMPTS, UNENDING[kind])
        metrics = engine.metrics()
    assert metrics.num_accepted_tokens > 0


@pytest.fixture(scope="module")
def sharp_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return SharpModels(tmp_path_factory.mktemp("sharp"))


@pytest.mark.cover(2)
@pytest.mark.parametrize("kind", ["greedy", "plain", "cut"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("kv", "selected"),
    [
        (streaming(12), [0, 1, 2, 3, *range(28, 36)]),
        (streaming(12, sink=0), range(24, 36)),
        (streaming(0.5, sink=8), [*range(8), *range(24, 36)]),
        (FULL, range(36)),
    ],
    ids=["streaming", "no sink", "share", "full"],
)
def test_drafts_are_what_a_mask_makes_of_the_model(
    sharp_models: Models, kind: str, compiled: bool, kv: KvSelectionConfig, selected: Sequence[int]
) -> None:
    """Blocks, positions, and the noise of the positions: each is seen here."""
    setting = SelfSetting(compiled=compiled, kv=kv)
    drafted = draft_once(sharp_models, setting, KINDS[kind], 6).drafted
    assert drafted == reference_draft(sharp_models, selected, KINDS[kind], 6)


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    "architecture", ["qwen3", "gpt_neox", "gpt2", "llama_yarn", "llama3_rope", "llama_linear_rope"]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_so_they_are_with_every_kind_of_position(
    sharp_models: Models, architecture: str, compiled: bool
) -> None:
    """That output is right says nothing of positions behind a gap: verification would put it right."""
    setting = SelfSetting(compiled=compiled, kv=streaming(12))
    drafted = draft_once(sharp_models, setting, GREEDY, 6, architecture).drafted
    selected = [0, 1, 2, 3, *range(28, 36)]
    assert drafted == reference_draft(sharp_models, selected, GREEDY, 6, architecture)
    pushed_together = [*(LONG[one] for one in selected), LONG[-1]]
    for token in drafted:
        with torch.inference_mode():
            logits = sharp_models.reference(architecture)(torch.tensor([pushed_together])).logits[0, -1]
        if int(logits.argmax()) != token:
            return
        pushed_together.append(token)
    pytest.fail("control: without the gap between positions other tokens would be drafted")


@pytest.mark.parametrize("kind", ["greedy", "plain"])
@pytest.mark.parametrize(
    ("kv", "selected"),
    [(streaming(12), [0, 1, 2, 3, *range(28, 36)]), (FULL, range(36))],
    ids=["streaming", "full"],
)
def test_nodes_of_a_tree_are_what_a_mask_makes_of_the_model(
    sharp_models: Models, kind: str, kv: KvSelectionConfig, selected: Sequence[int]
) -> None:
    """Each among the best behind its parent: what lies between them is of other paths."""
    answer = draft_once(sharp_models, SelfSetting(kv=kv, tree=BUSHY), KINDS[kind], BUSHY.max_nodes)
    assert answer.drafted_parents == BUSHY.parents
    paths: dict[int, list[int]] = {-1: []}
    children: dict[int, list[int]] = {}
    for node, (token, parent) in enumerate(zip(answer.drafted, BUSHY.parents, strict=True)):
        paths[node] = [*paths[parent], token]
        children.setdefault(parent, []).append(token)
    for parent, its in children.items():
        logits = reference_logits(sharp_models, selected, paths[parent])
        rows = SamplingRows.build([RowSpec(KINDS[kind], 12345, len(LONG) + len(paths[parent]), 1)])
        assert its == noisy_scores(logits, rows)[0].topk(len(its)).indices.tolist()


def test_the_likeliest_path_of_a_tree_that_sees_everything_is_accepted(models: Models) -> None:
    setting = SelfSetting(num_draft_tokens=BUSHY.max_nodes, batch=8, chunk=200, kv=FULL, tree=BUSHY)
    with setting.engine(models, "llama") as engine:
        engine.generate(PROMPTS, UNENDING["plain"])
        metrics = engine.metrics()
    assert metrics.num_drafts > 20
    # Behind the last tokens there are fewer nodes.
    assert metrics.num_accepted_tokens > 2.5 * metrics.num_drafts
    assert metrics.num_moved_kv > 0


@pytest.mark.parametrize("shape", [DYNAMIC, ENTROPY], ids=["dynamic", "entropy"])
def test_trees_by_confidence_have_room_for_what_they_read(models: Models, shape: TreeShape) -> None:
    """Seven nodes may be proposed, and so many read; a tree that sees everything is always right."""
    setting = SelfSetting(num_draft_tokens=7, batch=4, chunk=200, kv=FULL, tree=shape)
    with setting.engine(models, "llama") as engine:
        engine.generate(PROMPTS[:4], UNENDING["greedy"])
        engine.check_integrity()
        metrics = engine.metrics()
    assert metrics.num_drafts > 10
    assert metrics.num_accepted_tokens > 1.2 * metrics.num_drafts


@pytest.mark.full
@pytest.mark.parametrize("keys", [{"method": "layerskip", "exit_layer": 1}, SELF_STREAMING], ids=str)
def test_trees_over_two_ranks(models: Models, rank_pool: Pools, keys: dict[str, Any]) -> None:
    folder, params = models.load("llama").path, (ranked_engines.GREEDY, ranked_engines.PLAIN)
    with Engine(ranked_engines.config_of(folder)) as engine:
        expected = ranked_engines.generate(engine, params)
    tree = {"tree": {"shape": "static", "widths": [2, 1]}, "num_speculative_tokens": 4}
    config = ranked_engines.config_of(folder, 2, **keys, **tree)
    served = rank_pool(2).run(ranked_engines.serve, config, params)[0]
    assert served.streams == expected
    assert served.num_accepted > 10


def test_control_what_is_selected_shows(sharp_models: Models) -> None:
    drafts = {reference_draft(sharp_models, range(start, 36), KINDS["plain"], 6) for start in (0, 24, 28, 32)}
    assert len(drafts) > 1


@pytest.mark.parametrize("wrong", ["model", "noise"])
def test_control_wrong_positions_show(
    sharp_models: Models, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    select = SelfDrafter._select

    def forgetful(self: SelfDrafter, start: ChainStart, scores: None, budget: int) -> ChainStart:
        selected = select(self, start, scores, budget)
        num_dropped = selected.num_dropped
        if wrong == "model":
            return selected._replace(shift=PositionShift(-num_dropped, sys.maxsize))
        shift = PositionShift(num_dropped, sys.maxsize)
        return selected._replace(start=start.start - num_dropped, num_dropped=0, shift=shift)

    expected = reference_draft(sharp_models, [0, 1, 2, 3, *range(28, 36)], KINDS["plain"], 12)
    monkeypatch.setattr(SelfDrafter, "_select", forgetful)
    drafted = draft_once(sharp_models, SelfSetting(kv=streaming(12)), KINDS["plain"], 12).drafted
    assert drafted != expected


def test_verification_overwrites_what_drafting_wrote(models: Models) -> None:
    """K and V of the step, layer by layer, are those of a step that only verifies the same draft."""
    pools = []
    for is_drafted_there in (True, False):
        setting = SelfSetting(kv=streaming(8))
        runner = setting.runner(models.load("llama"), setting.num_blocks)
        target = LocalTarget(runner, setting.sampler(), self_drafting=setting.kv.make(BLOCK_SIZE))
        name, blocks = RequestId("a"), tuple(range(1, 21))
        prefill = TargetWork(name, tuple(LONG[:-1]), 0, 0, 0, blocks)
        target.run(TargetStep(0, (prefill,), (AdmittedSequence(name, 3, GREEDY),)))
        if is_drafted_there:
            work = TargetWork(name, (LONG[-1],), len(LONG) - 1, 1, 20, (), num_self_drafted=6)
            (answer,) = target.run(TargetStep(1, (work,))).results
        else:
            target.run(
                TargetStep(1, (TargetWork(name, (LONG[-1], *answer.drafted), len(LONG) - 1, 7, 20, ()),))
            )
        pools.append(runner.pool)
    assert answer.drafted
    for mine, other in zip(
        (*pools[0].keys, *pools[0].values), (*pools[1].keys, *pools[1].values), strict=True
    ):
        # Block 0 is nobody's.
        assert torch.equal(mine[1:21], other[1:21])


def test_mixed_wishes(models: Models, streams: Streams) -> None:
    """Requests with budgets of their own, grammars aside, in one batch; prompts are read meanwhile."""
    setting = SelfSetting(num_draft_tokens=4, batch=4, chunk=9, kv=streaming(12))
    kinds = ["greedy", "plain", "penalties", "cut"] * 2
    with setting.engine(models, "llama") as engine:
        requests = [
            msgspec.structs.replace(
                choice_requests(prompt, KINDS[kind], f"r{index}")[0],
                num_draft_tokens=(None, 0, 7, 2)[index % 4],
            )
            for index, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True))
        ]
        for request in requests:
            engine.add_request(request)
        outputs = []
        while engine.has_work:
            outputs += engine.step()
            engine.check_integrity()
    for index, (request, kind) in enumerate(zip(requests, kinds, strict=True)):
        mine = [output for output in outputs if output.request_id == request.request_id]
        assert tuple(tokens_of(mine)) == streams.alone("llama", kind, KINDS[kind])[index]


class Hearing(FixedController):
    """Keeps what it is told."""

    heard: list[RoundObservation]

    def observe(self, observation: RoundObservation) -> None:
        self.heard.append(observation)


def test_controllers_are_told_of_rows_that_the_target_has_drafted(models: Models) -> None:
    """Else what these cost is taken for what rounds without drafts cost."""
    with SelfSetting(num_draft_tokens=4, batch=2, kv=streaming(12)).engine(models, "llama") as engine:
        controller = Hearing(4)
        controller.heard = []
        engine._rounds._controller = TimedController(controller, engine._clock)
        engine.generate(PROMPTS[:2], KINDS["greedy"])
    drafted = [one for one in controller.heard if one.outcomes]
    assert len(drafted) > 3
    for one in drafted:
        rows = one.num_sequences + sum(outcome.num_drafted for outcome in one.outcomes)
        assert one.num_rows == rows > one.num_sequences


def test_prefix_cache_keeps_nothing_of_drafts(models: Models, streams: Streams) -> None:
    """Later requests continue what earlier ones have left, block by block."""
    expected = streams.alone("llama", "plain", KINDS["plain"])
    setting = SelfSetting(num_draft_tokens=6, batch=8, kv=streaming(12))
    with setting.engine(models, "llama") as engine:
        first = engine.generate(PROMPTS, KINDS["plain"])
        again = engine.generate(PROMPTS, KINDS["plain"])
        longer = [(*prompt, *stream[:-1]) for prompt, stream in zip(PROMPTS, expected, strict=True)]
        continued = engine.generate(longer, msgspec.structs.replace(GREEDY, max_tokens=8))
        metrics = engine.metrics()
    assert [result.token_ids for result in first] == expected
    assert [result.token_ids for result in again] == expected
    assert metrics.prefix_cache_hits > 100
    with Setting("none", batch=1).engine(models, "llama") as engine:
        for prompt, result in zip(longer, continued, strict=True):
            fresh = engine.generate([prompt], msgspec.structs.replace(GREEDY, max_tokens=8))[0]
            assert result.token_ids == fresh.token_ids


def test_draft_that_is_not_finite_costs_only_itself(
    models: Models, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft of tokens that nobody can compute is taken back, and the target goes on alone."""
    setting = SelfSetting(num_draft_tokens=4, batch=2)
    run = LocalTarget._run
    spoilt = []

    def spoil(self: LocalTarget, step: TargetStep, *drafted_for: AbstractSet[RequestId]) -> TargetResult:
        result = run(self, step, *drafted_for)
        if not any(work.num_sampled_rows > 1 for work in step.works):
            return result
        spoilt.append(step.step_id)
        failed = [
            msgspec.structs.replace(answer, token_ids=(), error="not finite", error_code="non_finite_logits")
            for answer in result.results
        ]
        return msgspec.structs.replace(result, results=tuple(failed))

    monkeypatch.setattr(LocalTarget, "_run", spoil)
    with setting.engine(models, "llama") as engine:
        results = engine.generate(PROMPTS[:2], KINDS["plain"])
    assert spoilt
    expected = streams.alone("llama", "plain", KINDS["plain"])
    assert [result.token_ids for result in results] == expected[:2]


def test_a_target_that_does_not_draft_is_refused(models: Models) -> None:
    setting = SelfSetting()
    runner = setting.runner(models.load("llama"), 40)
    with pytest.raises(ConfigError, match="method: self needs a target that drafts for itself"):
        Engine.from_parts(
            target=LocalTarget(runner, setting.sampler()),
            proposer=SelfSpeculation(),
            tokenizer=HuggingFaceTokenizer(make_tokenizer()),
        )


@pytest.mark.parametrize(
    "forge",
    [
        lambda answer: msgspec.structs.replace(answer, drafted=(*answer.drafted, 5, 5, 5, 5, 5, 5)),
        lambda answer: msgspec.structs.replace(answer, token_ids=answer.token_ids[:1]),
    ],
    ids=["more than asked for", "rows are missing"],
)
def test_wrong_answers_are_found(
    models: Models, forge: Callable[[WorkResult], WorkResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = LocalTarget.collect

    def forged(self: LocalTarget) -> TargetResult:
        result = collect(self)
        answers = [forge(answer) if answer.drafted else answer for answer in result.results]
        return msgspec.structs.replace(result, results=tuple(answers))

    monkeypatch.setattr(LocalTarget, "collect", forged)
    with SelfSetting(batch=1).engine(models, "llama") as engine:
        (result,) = engine.generate(PROMPTS[2:3], GREEDY)
        assert result.choices[0].finish_reason == "error"


def test_over_the_wire(models: Models, streams: Streams) -> None:
    """A target worker needs nothing more than the step, and the coordinator nothing but its answer."""
    setting = SelfSetting(num_draft_tokens=4, batch=8, chunk=16, num_blocks=18, kv=streaming(12))
    network = MemoryNetwork(seed=1)
    worker, owner = network.open(PeerId("target")), network.open(PeerId("coordinator"))
    worker.admit([owner.address])
    runner = setting.runner(models.load("llama"), setting.num_blocks)
    server = TargetServer(
        worker, LocalTarget(runner, setting.sampler(), self_drafting=setting.kv.make(BLOCK_SIZE))
    )
    network.serve(PeerId("target"), lambda: server.step(0))
    target = RemoteTarget(owner, worker.address, incarnation=1)
    assert target.description.drafts_itself
    with Engine.from_parts(
        target=target,
        proposer=SelfSpeculation(),
        tokenizer=HuggingFaceTokenizer(make_tokenizer()),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16),
        controller=FixedController(4),
    ) as engine:
        results = engine.generate(PROMPTS, KINDS["plain"])
        metrics = engine.metrics()
    assert [result.token_ids for result in results] == streams.alone("llama", "plain", KINDS["plain"])
    assert metrics.num_accepted_tokens > 0
    assert metrics.num_preemptions > 0
    assert metrics.draft_s > 0.0


def test_drafts_are_measured(models: Models) -> None:
    """What the controller begins with; and nothing of it stays behind."""
    setting = SelfSetting(kv=streaming(12))
    runner = setting.runner(models.load("llama"), 200)
    target = LocalTarget(runner, setting.sampler(), self_drafting=setting.kv.make(BLOCK_SIZE))
    plan = ProfilePlan(key="k", max_num_seqs=4, max_num_batched_tokens=8, max_draft_tokens=5, budget_s=1.0)
    profile = measure_profile(target, SelfSpeculation(), plan)
    assert profile.fault() is None
    assert (profile.draft[0].num_sequences, profile.draft[0].num_steps) == (1, 4)
    assert all(point.seconds > 1e-6 for point in profile.draft)
    assert profile.verify
    assert target._sequences == {}


def test_goodput_controller(models: Models) -> None:
    """An engine as it is built from a configuration: costs, controller, streams."""
    folder = models.load("llama").path
    texts = []
    for speculative in (
        {"method": "none"},
        {
            "method": "self",
            "profile_seconds": 0.5,
            "profile_dir": str(folder.parent / "profiles"),
            "kv": {"policy": "streaming", "budget": 16},
        },
    ):
        config = EngineConfig(
            target=ModelConfig(model=str(folder), dtype="float32", compile=CompileConfig(mode="off")),
            speculative_config=SpeculativeConfig.model_validate(speculative),
            cache=CacheConfig(block_size=4, num_blocks=60),
        )
        with Engine(config) as engine:
            texts.append([result.token_ids for result in engine.generate(PROMPTS, KINDS["cut"])])
            assert engine.description.drafts_itself == (speculative["method"] == "self")
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kv": {"policy": "streaming", "budget": 7}}, r"kv\.budget: 7 tokens do not hold kv\.sink_tokens"),
        ({"kv": {"policy": "streaming", "floor": 7}}, r"kv\.floor: 7 tokens do not hold"),
        ({"kv": {"policy": "streaming", "budget": 2.5}}, "budget: 2.5 is no share"),
        ({"kv": {"policy": "other"}}, "policy"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method: block does not go with method self"),
        ({"model": "draft"}, "method self takes no `model`"),
        ({"overlap": "ping_pong"}, "method self has none"),
        ({"method": "ngram", "kv": {"policy": "streaming"}}, "kv.policy: streaming .* method ngram has none"),
    ],
)
def test_settings_that_cannot_be(more: dict[str, object], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        SpeculativeConfig.model_validate({"method": "self", **more})


def test_stages_are_refused() -> None:
    with pytest.raises(pydantic.ValidationError, match=r"method: self .*pipeline_parallel_size: 2"):
        EngineConfig.model_validate(
            {
                "target": {"model": "m", "pipeline_parallel_size": 2},
                "speculative_config": {"method": "self"},
            }
        )


class LoopOfOne:
    """Drafts one start in one go, and leaves several to the loop that goes step by step."""

    def __init__(self, stepwise: StepwiseDraftLoop) -> None:
        self.stepwise = stepwise
        self.answers: list[list[list[int]] | None] = []

    def try_draft(self, starts: Sequence[ChainStart]) -> list[list[int]] | None:
        self.answers.append(None if len(starts) > 1 else self.stepwise.draft(starts))
        return self.answers[-1]


def test_a_fused_loop_drafts_what_it_can(models: Models) -> None:
    config = EngineConfig(
        target=ModelConfig(model=str(models.load("llama").path), compile=CompileConfig(mode="off")),
        speculative_config=SpeculativeConfig(
            method="self", kv=streaming(12), controller="fixed", num_speculative_tokens=3
        ),
        cache=CacheConfig(num_blocks=200, block_size=BLOCK_SIZE),
    )
    prompts = [list(prompt) for prompt in ragged_prompts(3)]
    with Engine(config) as engine:
        expected = [list(result.token_ids) for result in engine.generate(prompts, GREEDY)]
    with Engine(config) as engine:
        target = engine._parts.target
        assert isinstance(target, LocalTarget)
        assert target._self_drafter is not None
        loop = LoopOfOne(target._self_drafter._stepwise)
        target._self_drafter._fused = loop
        assert [list(result.token_ids) for result in engine.generate(prompts, GREEDY)] == expected
        assert None in loop.answers
        assert list(next(iter(engine.generate(prompts[:1], GREEDY))).token_ids) == expected[0]
        assert any(loop.answers)
