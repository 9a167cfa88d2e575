"""Budgets of requests, and of an engine while it runs: they change what is drafted, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache

import msgspec
import pydantic
import pytest

from specdec.core.clock import ManualClock
from specdec.core.errors import ConfigError, InputError
from specdec.core.ids import RequestId
from specdec.core.plan import TargetStep
from specdec.core.sampling_params import SamplingParams
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.engine import Engine
from specdec.engine.metrics.status import StatusKeeper
from specdec.engine.targets.local_target import LocalTarget
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel
from specdec.engine.text.tokenizer import HuggingFaceTokenizer
from specdec.kv.selection import (
    BudgetAmount,
    KvBudget,
    KvBudgets,
    KvSelectionConfig,
    WrittenBudget,
    budgets_of,
)
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.draft_window import DraftWindow, draft_window
from specdec.proposers.self_speculation import SelfSpeculation
from specdec.sampling.sampler import Sampler
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController, SpeculationController
from specdec.scheduling.speculation.cost import assumed_profile
from specdec.scheduling.speculation.cost_profile import CostProfile
from specdec.scheduling.speculation.goodput_controller import GoodputController
from specdec.scheduling.speculation.settings import ControllerSettings
from tests.architectures import make_tokenizer
from tests.specdec.engine.identity_settings import Setting
from tests.specdec.engine.tiny_models import Models, ragged_prompts
from tests.specdec.engine.toy_engines import MODEL, VOCAB_SIZE, request, toy_engine
from tests.specdec.proposers.short_runner import ShortRunner

pytestmark = pytest.mark.usefixtures("one_thread")
K = 4
BLOCK_SIZE = 4
STREAMING = KvSelectionConfig(policy="streaming", budget=8, sink_tokens=4, floor=8)
PROMPTS = ragged_prompts(6, seed=2)
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    "sampled": SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.8, max_tokens=30, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.4
    ),
}
OWN: Sequence[BudgetAmount | None] = (None, 8, 12, 20, 0.5, 4096)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


Alone = Callable[[str, bool], dict[str, tuple[int, ...]]]


@pytest.fixture(scope="module")
def alone(models: Models) -> Alone:
    """What the target says to each prompt by itself."""

    @cache
    def streams(kind: str, compiled: bool) -> dict[str, tuple[int, ...]]:
        with Setting("none", batch=1, compiled=compiled).engine(models, "llama") as engine:
            got = {}
            for index, prompt in enumerate(PROMPTS):
                engine.add_request(request(f"r{index}", prompt, PARAMS[kind], seed=index))
                got |= run(engine)
        return got

    return streams


class SeenTarget(LocalTarget):
    """Keeps the budgets of what it is asked to draft, by request and round."""

    budgets: dict[RequestId, list[int]]

    def run(self, step: TargetStep) -> object:  # type: ignore[override]
        for work in step.works:
            if work.num_self_drafted:
                self.budgets.setdefault(work.request_id, []).append(work.kv_budget)
        return super().run(step)


def self_engine(
    models: Models,
    *,
    kv: KvSelectionConfig = STREAMING,
    num_blocks: int = 200,
    compiled: bool = True,
    controller: SpeculationController | None = None,
) -> tuple[Engine, SeenTarget]:
    setting = Setting("none", compiled=compiled)
    runner = setting.runner(models.load("llama"), num_blocks)
    target = SeenTarget(runner, setting.sampler(), self_drafting=kv.make(BLOCK_SIZE))
    target.budgets = {}
    engine = Engine.from_parts(
        target=target,
        proposer=SelfSpeculation(),
        tokenizer=HuggingFaceTokenizer(make_tokenizer()),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=32),
        controller=controller or FixedController(K),
        kv_budgets=budgets_of(kv, K),
    )
    return engine, target


def run(engine: Engine, changes: dict[int, BudgetAmount] | None = None) -> dict[str, tuple[int, ...]]:
    """Run to the end; change the engine's budget before some of the rounds."""
    got: dict[str, tuple[int, ...]] = {}
    number = 0
    while engine.has_work:
        if changes and number in changes:
            engine.set_kv_budget(changes[number])
        number += 1
        for output in engine.step():
            got[output.request_id] = (*got.get(output.request_id, ()), *output.token_ids)
    engine.check_integrity()
    return got


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize(
    ("compiled", "num_blocks"), [(True, 200), (True, 40), pytest.param(False, 40, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("policy", ["streaming", "verified", "snapkv"])
def test_any_mix_of_budgets_says_the_same(
    models: Models, alone: Alone, kind: str, compiled: bool, num_blocks: int, policy: str
) -> None:
    kv = STREAMING.model_copy(update={"policy": policy})
    engine, target = self_engine(models, kv=kv, num_blocks=num_blocks, compiled=compiled)
    with engine:
        for index, (prompt, own) in enumerate(zip(PROMPTS, OWN, strict=True)):
            one = request(f"r{index}", prompt, PARAMS[kind], seed=index)
            engine.add_request(msgspec.structs.replace(one, kv_budget=own))
        got = run(engine, {6: 24, 12: 0.9, 18: 8})
        metrics = engine.metrics()
    assert got == alone(kind, compiled)
    assert metrics.num_accepted_tokens > 0
    assert (metrics.num_preemptions > 0) == (num_blocks == 40)
    seen = {name: set(budgets) for name, budgets in target.budgets.items()}
    assert [seen[RequestId(f"r{index}")] for index in (1, 2, 3, 5)] == [{8}, {12}, {20}, {4096}]
    assert {8, 24} <= seen[RequestId("r0")]
    assert min(seen[RequestId("r4")]) >= len(PROMPTS[4]) // 2


def test_a_budget_decides_what_is_drafted(models: Models) -> None:
    """Drafts that see everything are accepted more often than those that see a window."""
    accepted = {}
    for own in (8, 4096):
        engine, _ = self_engine(models)
        with engine:
            for index, prompt in enumerate(PROMPTS):
                one = request(f"r{index}", prompt, PARAMS["sampled"], seed=index)
                engine.add_request(msgspec.structs.replace(one, kv_budget=own))
            run(engine)
            metrics = engine.metrics()
        accepted[own] = metrics.num_accepted_tokens / metrics.num_draft_tokens
    assert accepted[8] < 0.95
    assert accepted[4096] > accepted[8]


def test_the_engines_budget_changes_between_rounds(models: Models) -> None:
    engine, target = self_engine(models)
    with engine:
        engine.add_request(request("a", PROMPTS[3], PARAMS["greedy"]))
        run(engine, {4: 16, 8: 12})
    budgets = target.budgets[RequestId("a")]
    assert "speculation_mean_kv_budget" not in engine.metrics().snapshot(), "nothing runs"
    changes = [budget for index, budget in enumerate(budgets) if index == 0 or budgets[index - 1] != budget]
    assert changes == [8, 16, 12]


def test_metrics_and_status_tell_the_budget(models: Models) -> None:
    engine, _ = self_engine(models)
    keeper = StatusKeeper(ManualClock(), max_num_running=6)
    with engine:
        for index, own in enumerate((None, 40)):
            one = request(f"r{index}", PROMPTS[3], PARAMS["greedy"], seed=index)
            engine.add_request(msgspec.structs.replace(one, kv_budget=own))
        while engine.metrics().num_running < 2:
            engine.step()
        assert engine.metrics().snapshot()["speculation_mean_kv_budget"] == 24
        assert keeper.take(engine.metrics(), {}).choice.mean_kv_budget == 24
        engine.set_kv_budget(20)
        assert engine.metrics().snapshot()["speculation_mean_kv_budget"] == 30
        run(engine)


@pytest.mark.parametrize("written", [0.5, "50%", " 50 % "])
def test_a_share_may_be_a_percentage(models: Models, alone: Alone, written: WrittenBudget) -> None:
    """Of a request's own budget, and of that which others get."""
    engine, target = self_engine(models)
    with engine:
        engine.set_kv_budget(written)
        for index, prompt in enumerate(PROMPTS):
            one = request(f"r{index}", prompt, PARAMS["greedy"], seed=index)
            own = written if index % 2 else None
            engine.add_request(msgspec.structs.replace(one, kv_budget=own))
        assert run(engine) == alone("greedy", True)
    for index in (2, 3, 5):
        first = target.budgets[RequestId(f"r{index}")][0]
        assert len(PROMPTS[index]) / 2 <= first <= (len(PROMPTS[index]) + 30) / 2 + 1


def test_an_async_engine_has_its_budget_changed(models: Models, alone: Alone) -> None:
    engine, target = self_engine(models)
    service = AsyncEngine(engine)

    async def generate(index: int) -> tuple[int, ...]:
        one = request(f"r{index}", PROMPTS[index], PARAMS["greedy"], seed=index)
        return tuple([token async for output in service.generate(one) for token in output.token_ids])

    try:
        service.set_kv_budget(20)
        first = asyncio.run(generate(2))
        service.set_kv_budget("100%")
        second = asyncio.run(generate(3))
        with pytest.raises(ConfigError, match=r"kv\.budget: 7 tokens do not hold"):
            service.set_kv_budget(7)
    finally:
        service.close()
    assert set(target.budgets[RequestId("r2")]) == {20}
    assert min(target.budgets[RequestId("r3")]) >= len(PROMPTS[3])
    expected = alone("greedy", True)
    assert (first, second) == (expected["r2"], expected["r3"])


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (7, r"kv\.budget: 7 tokens do not hold kv\.sink_tokens \(4\) and a draft .* \(4\): give at least 8"),
        (1.5, "kv.budget: 1.5 is no share"),
        (0, "kv.budget: 0 tokens are none"),
        ("150%", "kv.budget: 1.5 is no share"),
        ("8", """kv.budget: '8' is not a number of tokens, nor a share such as "5%" or 0.05"""),
    ],
)
def test_a_default_that_cannot_be_is_refused(models: Models, written: WrittenBudget, message: str) -> None:
    engine, _ = self_engine(models)
    with engine, pytest.raises(ConfigError, match=message):
        engine.set_kv_budget(written)


@pytest.mark.parametrize(
    ("written", "k", "message"),
    [
        (7, None, r"speculation.kv_budget: 7 tokens do not hold .*: give at least 8"),
        (7, 6, r"speculation.kv_budget: 7 tokens do not hold .* \(4\): give at least 8"),
        (6, 3, r"speculation.kv_budget: 6 tokens do not hold .* \(3\): give at least 7"),
        (-3, None, r"speculation.kv_budget: -3 tokens are none"),
        ("much", None, r"speculation.kv_budget: 'much' is not a number of tokens"),
    ],
)
def test_a_requests_budget_that_cannot_be_is_refused(
    models: Models, written: WrittenBudget, k: int | None, message: str
) -> None:
    engine, _ = self_engine(models)
    one = request("a", PROMPTS[0], PARAMS["greedy"])
    with engine, pytest.raises(InputError, match=message) as caught:
        engine.add_request(msgspec.structs.replace(one, kv_budget=written, num_draft_tokens=k))
    assert caught.value.param == "speculation.kv_budget"


def test_a_share_that_cannot_be_names_the_floor() -> None:
    budgets = KvBudgets(KvSelectionConfig(policy="streaming", budget=512, floor=1), 4)
    assert budgets.fault(8) is None
    fault = budgets.fault("50%")
    assert fault is not None
    assert fault.startswith(
        "a share is kv.floor tokens at least, and 1 tokens do not hold kv.sink_tokens (4)"
    )


def test_without_a_policy_there_are_no_budgets(models: Models) -> None:
    with Setting("ngram").engine(models, "llama") as engine:
        one = msgspec.structs.replace(request("a", PROMPTS[0], PARAMS["greedy"]), kv_budget=512)
        with pytest.raises(InputError, match=r"speculation.kv_budget: drafts attend to everything here"):
            engine.add_request(one)
        with pytest.raises(ConfigError, match=r"drafts attend to everything here: configure kv\.policy"):
            engine.set_kv_budget(512)
    assert budgets_of(KvSelectionConfig(), 4) is None


def test_shares_follow_the_length() -> None:
    budgets = KvBudgets(KvSelectionConfig(policy="streaming", budget=0.05, floor=256), 4)
    assert [budgets.tokens(None, length) for length in (100, 5120, 5140, 20000)] == [256, 256, 257, 1000]
    assert [budgets.tokens(0.5, length) for length in (100, 1000)] == [256, 500]
    assert budgets.tokens(64, 20000) == 64
    budgets.set_default(300)
    assert budgets.tokens(None, 20000) == 300
    assert budgets.default.amount == 300


SEVERAL = KvSelectionConfig(policy="streaming", budget=(8, 16, 0.5), sink_tokens=4, floor=8)


class Restless(FixedController):
    """Picks another budget whenever it is asked."""

    def __init__(self) -> None:
        super().__init__(K)
        self._generator = random.Random(1)

    @property
    def pick_kv_budget(self) -> Callable[[RequestId, str], KvBudget]:
        return lambda _request_id, _class_name: self._generator.choice(SEVERAL.budgets)


def goodput_controller() -> GoodputController:
    settings = ControllerSettings(max_draft_tokens=K, kv_budgets=SEVERAL.budgets, max_sequences=6)
    return GoodputController(settings, cheap_drafts())


@pytest.mark.cover(1)
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("make", [Restless, goodput_controller])
def test_what_a_controller_picks_says_the_same(
    models: Models, kind: str, make: Callable[[], SpeculationController]
) -> None:
    controller = make()
    engine, target = self_engine(models, kv=SEVERAL, num_blocks=60, controller=controller)
    with engine:
        for index in range(5 * len(PROMPTS)):
            one = request(f"r{index}", PROMPTS[index % len(PROMPTS)], PARAMS[kind], seed=index)
            own = 12 if index % 5 == 4 else None
            engine.add_request(msgspec.structs.replace(one, kv_budget=own))
        got = run(engine)
    with Setting("none", batch=1, compiled=True).engine(models, "llama") as alone:
        for index in range(5 * len(PROMPTS)):
            one = request(f"r{index}", PROMPTS[index % len(PROMPTS)], PARAMS[kind], seed=index)
            alone.add_request(one)
        assert run(alone) == got
    free = [name for name in target.budgets if int(name[1:]) % 5 != 4]
    drafted = {budget for name in free for budget in target.budgets[name]}
    if isinstance(controller, Restless):  # the other one goes by real times
        assert {8, 16} < drafted
    assert all(set(target.budgets[name]) == {12} for name in target.budgets if name not in free)


def cheap_drafts() -> CostProfile:
    """Costs by which drafting always pays."""
    profile = assumed_profile()
    draft = tuple(msgspec.structs.replace(one, seconds=1e-2 * one.seconds) for one in profile.draft)
    return msgspec.structs.replace(profile, draft=draft)


def test_a_budget_that_is_set_is_picked_no_more(models: Models) -> None:
    engine, target = self_engine(models, kv=SEVERAL, controller=Restless())
    with engine:
        engine.set_kv_budget(20)
        for index, prompt in enumerate(PROMPTS):
            engine.add_request(request(f"r{index}", prompt, PARAMS["sampled"], seed=index))
        run(engine)
    assert {budget for budgets in target.budgets.values() for budget in budgets} == {20}


def test_with_a_fixed_k_the_first_of_several_counts(models: Models) -> None:
    engine, target = self_engine(models, kv=SEVERAL)
    with engine:
        engine.add_request(request("a", PROMPTS[3], PARAMS["greedy"]))
        run(engine)
    assert set(target.budgets[RequestId("a")]) == {8}


@pytest.mark.parametrize(
    ("budget", "amounts"),
    [
        (16, (16,)),
        ("5%", (0.05,)),
        ([256, 512, 0.05], (256, 512, 0.05)),
        ([256, "5%"], (256, 0.05)),
    ],
)
def test_lists_of_budgets(budget: object, amounts: tuple[BudgetAmount, ...]) -> None:
    config = KvSelectionConfig.model_validate({"policy": "streaming", "budget": budget})
    assert tuple(one.amount for one in config.budgets) == amounts
    assert KvSelectionConfig.model_validate(config.model_dump()) == config
    assert KvSelectionConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ([], "a list takes one or more budgets, all of them different"),
        ([256, 256], "all of them different"),
        ([256, 7], r"kv\.budget: 7 tokens do not hold"),
        ([256, 1.5], "1.5 is no share"),
        ([256, "much"], "'much' is not a number of tokens"),
    ],
)
def test_lists_that_cannot_be(budget: object, message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        SpeculativeConfig.model_validate(
            {"method": "self", "kv": {"policy": "streaming", "budget": budget, "floor": 16}}
        )


def test_memory_of_windows_is_planned_for_the_largest() -> None:
    speculative = SpeculativeConfig.model_validate(
        {"method": "draft_model", "model": "m", "kv": {"policy": "streaming", "budget": [256, 1024, 0.01]}}
    )
    its = draft_window(speculative)
    assert its is not None
    assert its.selection.select(100_000).num_dropped <= 100_000 - 1024
    assert [speculative.kv.largest.tokens(length) for length in (100, 100_000, 200_000)] == [1024, 1024, 2000]


def test_memory_of_windows_is_planned_for_the_largest_at_the_length_of_texts() -> None:
    """A share that is most of a long text is not of a short one."""
    speculative = SpeculativeConfig.model_validate(
        {"method": "draft_model", "model": "m", "kv": {"policy": "streaming", "budget": [1024, "5%"]}}
    )
    its = draft_window(speculative)
    assert its is not None
    for length, most in ((512, 512), (4096, 1024), (16_384, 1024), (100_000, 5000)):
        assert its.max_held_tokens(length, speculative.cache.block_size) >= most


# --------------------------------------------------------------------------------- a draft model's window


def toy_window() -> DraftWindow:
    return DraftWindow(selection=STREAMING.make(BLOCK_SIZE), num_piece_tokens=8, num_draft_tokens=2 * K + 1)


def toy_drafter(num_blocks: int) -> DraftModelProposer:
    similar = ToyModel(VOCAB_SIZE, seed=1, perturbation=0.0)
    runner = ToyRunner(similar, num_blocks=num_blocks)
    return DraftModelProposer(
        runner,
        DraftChoice(sampler=Sampler(), vocab_size=VOCAB_SIZE),
        reading=DraftReading(window=toy_window()),
    )


@pytest.mark.parametrize("params", [PARAMS["greedy"], PARAMS["sampled"]], ids=["greedy", "sampled"])
def test_windows_of_any_size_say_the_same(params: SamplingParams) -> None:
    generator = random.Random(3)
    prompts = [generator.choices(range(VOCAB_SIZE), k=length) for length in (2, 90, 9, 60, 120, 30)]
    drafter = toy_drafter(400)
    engine = toy_engine(drafter, num_draft_tokens=K, kv_budgets=budgets_of(STREAMING, K))
    for index, (prompt, own) in enumerate(zip(prompts, OWN, strict=True)):
        one = request(f"r{index}", prompt, params, seed=index)
        engine.add_request(msgspec.structs.replace(one, kv_budget=own))
    held: dict[str, int] = {}
    got: dict[str, list[int]] = {}
    number = 0
    while engine.has_work:
        number += 1
        if number % 5 == 0:
            engine.set_kv_budget((8, 64, 16, 0.5)[number // 5 % 4])
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
        drafter.check_integrity()
        for name, state in drafter.sequences._states.items():
            held[name] = max(held.get(name, 0), state.table.num_blocks)
    for index, prompt in enumerate(prompts):
        assert got[f"r{index}"] == MODEL.continuation(prompt, params, index, 30)
    assert engine.metrics().num_accepted_tokens > 0
    # Of long ones, who may keep more holds more; by 4096 nothing is ever freed.
    assert held["r1"] < held["r3"] < held["r4"]
    assert held["r5"] >= (30 + 29) // BLOCK_SIZE


@pytest.mark.parametrize("params", [PARAMS["greedy"], PARAMS["sampled"]], ids=["greedy", "sampled"])
def test_no_budget_takes_positions_that_there_are_not(params: SamplingParams) -> None:
    """Positions among what is kept, 64 of them: whatever budgets ask for, the runner sees no other."""
    similar = ToyModel(VOCAB_SIZE, seed=1, perturbation=0.0)
    its = DraftWindow(
        selection=STREAMING.make(BLOCK_SIZE),
        num_piece_tokens=8,
        num_draft_tokens=2 * K + 1,
        num_positions=64,
    )
    runner = ShortRunner(similar, num_blocks=400, max_model_len=64)
    drafter = DraftModelProposer(
        runner, DraftChoice(sampler=Sampler(), vocab_size=VOCAB_SIZE), reading=DraftReading(window=its)
    )
    engine = toy_engine(drafter, num_draft_tokens=K, kv_budgets=budgets_of(STREAMING, K))
    generator = random.Random(6)
    prompts = [generator.choices(range(VOCAB_SIZE), k=length) for length in (2, 90, 9, 60, 120, 30)]
    long = msgspec.structs.replace(params, max_tokens=100)
    for index, (prompt, own) in enumerate(zip(prompts, OWN, strict=True)):
        one = request(f"r{index}", prompt, long, seed=index)
        engine.add_request(msgspec.structs.replace(one, kv_budget=own))
    got: dict[str, list[int]] = {}
    number = 0
    while engine.has_work:
        number += 1
        if number % 5 == 0:
            engine.set_kv_budget((8, 64, 16, 0.5)[number // 5 % 4])
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
        drafter.check_integrity()
    for index, prompt in enumerate(prompts):
        assert got[f"r{index}"] == MODEL.continuation(prompt, long, index, 100)
    assert engine.metrics().num_accepted_tokens > 100
    assert drafter.counters["draft_windows_reread"] > 5


def test_a_window_grows_again_and_shrinks_at_once() -> None:
    """What has been freed does not come back: a larger budget fills with what comes."""
    drafter = toy_drafter(400)
    its, budgets = PARAMS["greedy"], KvBudgets(STREAMING, K)
    engine = toy_engine(drafter, num_draft_tokens=K, kv_budgets=budgets)
    prompt = random.Random(4).choices(range(VOCAB_SIZE), k=60)
    long = msgspec.structs.replace(its, max_tokens=150)
    engine.add_request(request("a", prompt, long))
    sizes = []
    while engine.has_work:
        if len(sizes) == 10:
            engine.set_kv_budget(80)
        if len(sizes) == 30:
            engine.set_kv_budget(8)
        engine.step()
        state = drafter.sequences._states.get(RequestId("a"))
        if state is not None:
            sizes.append(state.table.num_blocks)
    small = max(sizes[1:10])
    assert small <= 7
    assert all(later - earlier <= 3 for earlier, later in itertools.pairwise(sizes[10:30]))
    assert max(sizes[11:30]) >= small + 6
    assert len(sizes) > 32
    assert max(sizes[31:]) <= 7


def test_a_budget_never_asks_for_more_than_the_pool_has() -> None:
    """One sequence with a budget beyond the pool keeps what fits, and goes on being drafted for."""
    drafter = toy_drafter(24)
    engine = toy_engine(drafter, num_draft_tokens=K, kv_budgets=budgets_of(STREAMING, K))
    prompt = random.Random(5).choices(range(VOCAB_SIZE), k=200)
    one = request("a", prompt, msgspec.structs.replace(PARAMS["greedy"], max_tokens=20))
    engine.add_request(msgspec.structs.replace(one, kv_budget=4096))
    got = []
    while engine.has_work:
        got += [token for output in engine.step() for token in output.token_ids]
        drafter.check_integrity()
    assert got == MODEL.continuation(prompt, one.params, one.seed, 20)
    assert engine.metrics().num_draft_tokens > 10


@pytest.mark.parametrize("budget", [64, 4096])
def test_a_budget_that_was_raised_leaves_nobody_without_drafts(budget: int) -> None:
    """A pool of windows as configured is divided among those who are there, whatever they ask for."""
    num_requests = 8
    per_sequence = toy_window().max_blocks(200, BLOCK_SIZE)
    drafter = toy_drafter(1 + num_requests * per_sequence)
    engine = toy_engine(drafter, num_draft_tokens=K, kv_budgets=budgets_of(STREAMING, K))
    generator = random.Random(8)
    prompts = [generator.choices(range(VOCAB_SIZE), k=90) for _ in range(num_requests)]
    params = msgspec.structs.replace(PARAMS["greedy"], max_tokens=60)
    for index, prompt in enumerate(prompts):
        engine.add_request(request(f"r{index}", prompt, params, seed=index))
    got: dict[str, list[int]] = {}
    number = 0
    while engine.has_work:
        number += 1
        if number == 8:
            engine.set_kv_budget(budget)
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
        drafter.check_integrity()
        assert not drafter.sequences._crowded_out
    for index, prompt in enumerate(prompts):
        assert got[f"r{index}"] == MODEL.continuation(prompt, params, index, 60)
