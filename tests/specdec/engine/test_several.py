"""Several drafters in one engine: a request says the same whoever drafts for it, be it another each round."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdec.core.clock import Clock, ManualClock
from specdec.core.errors import ConfigError, InputError
from specdec.core.ids import RequestId
from specdec.core.plan import TargetStep
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.build import kv_budgets_of
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyTarget, ToyTokenizer
from specdec.kv.selection import KvBudget
from specdec.proposers.base import Proposer
from specdec.proposers.lookup_config import SuffixConfig
from specdec.proposers.none import NoProposer
from specdec.proposers.self_speculation import SelfSpeculation
from specdec.proposers.several.proposer import SeveralProposers, ShadowDrafter
from specdec.proposers.suffix import SuffixProposer
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from specdec.scheduling.speculation.cost import assumed_profile
from specdec.scheduling.speculation.drafter_shares import DrafterSet
from specdec.scheduling.speculation.goodput_controller import GoodputController
from specdec.scheduling.speculation.settings import ControllerSettings
from tests.architectures import save_model
from tests.specdec.engine.toy_engines import (
    MODEL,
    VOCAB_SIZE,
    OracleProposer,
    expected_tokens,
    make_proposer,
    request,
    run,
    tokens_of,
)

NAMES = ("lookup", "model", "oracle")


def engine_of(
    members: Sequence[Proposer] | None = None,
    *,
    shares: Sequence[float] = (0.0, 0.0, 0.0),
    shadows: Sequence[ShadowDrafter] = (),
    num_blocks: int = 256,
    controller: Any = None,
    clock: Clock | None = None,
) -> tuple[Engine, DrafterSet]:
    if members is None:
        members = [make_proposer("ngram"), make_proposer("draft_model"), OracleProposer()]
    drafters = DrafterSet(names=NAMES[: len(members)], shares=tuple(shares)[: len(members)])
    engine = Engine.from_parts(
        target=ToyTarget(MODEL, num_blocks=num_blocks),
        proposer=SeveralProposers(members, shadows=shadows, clock=clock),
        tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        controller=controller or FixedController(4),
        drafters=drafters,
        clock=clock,
    )
    return engine, drafters


def requests_of(rng: random.Random, number: int = 6, **more: Any) -> list[Request]:
    """Requests over a few tokens that begin alike: lookups and the prefix cache find much."""
    start = tuple(rng.choices(range(3), k=8))
    made = []
    for index in range(number):
        prompt = (*start, *rng.choices(range(3), k=rng.randint(1, 12)))
        params = SamplingParams(temperature=rng.choice([0.0, 0.7, 1.0]), max_tokens=rng.randint(12, 30))
        one = request(f"r{index}", prompt, params, seed=rng.randrange(1 << 32))
        made.append(msgspec.structs.replace(one, **more))
    return made


@pytest.mark.parametrize("num_blocks", [256, 24], ids=["room", "preempted"])
def test_each_request_has_its_own_in_one_batch(num_blocks: int) -> None:
    engine, _ = engine_of(num_blocks=num_blocks)
    named = [
        msgspec.structs.replace(one, drafter=NAMES[index % 3])
        for index, one in enumerate(requests_of(random.Random(3)))
    ]
    outputs = run(engine, *named)
    for one in named:
        assert tokens_of(outputs[one.request_id]) == expected_tokens(one)
    metrics = engine.metrics()
    assert (metrics.num_preemptions > 0) == (num_blocks == 24)
    assert metrics.prefix_cache_hits > 0
    counts = metrics.by_drafter
    assert list(counts) == list(NAMES)
    assert all(its.num_requests == 2 and its.num_drafts > 0 for its in counts.values())
    assert counts["oracle"].num_accepted_tokens == counts["oracle"].num_draft_tokens
    assert sum(its.num_draft_tokens for its in counts.values()) == metrics.num_draft_tokens
    assert sum(its.num_accepted_tokens for its in counts.values()) == metrics.num_accepted_tokens
    assert counts["lookup"].num_accepted_tokens < counts["lookup"].num_draft_tokens
    values = metrics.snapshot()
    assert values['drafter_num_requests{drafter="model"}'] == 2
    assert values['drafter_num_requests_running{drafter="model"}'] == 0


@pytest.mark.parametrize("seed", range(8))
def test_changes_at_run_time_change_no_token(seed: int) -> None:
    """Every request gets another drafter every few rounds, in any order, in a pool that is too small."""
    rng = random.Random(seed)
    engine, drafters = engine_of(num_blocks=rng.choice([24, 40, 256]))
    had: dict[RequestId, int] = {}
    drafters.pick = lambda request_id, _: had.setdefault(request_id, rng.randrange(3))
    made = requests_of(rng, number=8)
    for one in made:
        engine.add_request(one)
    outputs: dict[str, list[Any]] = {one.request_id: [] for one in made}
    num_changes = 0
    while engine.has_work:
        if rng.random() < 0.7:
            had = {name: rng.randrange(3) for name in had}
            num_changes += 1
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    assert num_changes > 2
    for one in made:
        assert tokens_of(outputs[one.request_id]) == expected_tokens(one)
    assert all(its.num_accepted_tokens > 0 for its in engine.metrics().by_drafter.values())


def test_control_a_drafter_that_is_believed_shows() -> None:
    """Negative control: the wrong tokens of one drafter would change its requests, if they were believed."""
    wrong = OracleProposer(wrong_from=0)
    engine, _ = engine_of([make_proposer("ngram"), wrong])
    one = requests_of(random.Random(1), 1, drafter="model")[0]
    assert tokens_of(run(engine, one)[one.request_id]) == expected_tokens(one)
    counts = engine.metrics().by_drafter["model"]
    assert counts.num_draft_tokens > 0
    assert counts.num_accepted_tokens == 0


def test_shares_fall_by_the_id_and_the_controller_has_the_rest() -> None:
    engine, drafters = engine_of(shares=(0.25, 0.25, 0.0))
    made = requests_of(random.Random(5), number=40)
    run(engine, *made)
    by_name = {name: its.num_requests for name, its in engine.metrics().by_drafter.items()}
    own = [drafters.own(one.request_id, None) for one in made]
    assert by_name["model"] == own.count(1) > 0
    assert by_name["oracle"] == 0
    assert by_name["lookup"] <= own.count(0) + own.count(None)


def test_a_name_that_nobody_has_is_an_error() -> None:
    engine, _ = engine_of()
    with pytest.raises(
        InputError, match=r"speculation\.drafter: there is no drafter 'eagle' here; known are lookup"
    ):
        engine.add_request(requests_of(random.Random(1), 1, drafter="eagle")[0])
    alone = Engine.from_parts(
        target=ToyTarget(MODEL), proposer=NoProposer(), tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE)
    )
    with pytest.raises(InputError, match=r"no drafters to choose from here .*leave it out") as raised:
        alone.add_request(requests_of(random.Random(1), 1, drafter="lookup")[0])
    assert raised.value.param == "speculation.drafter"


def test_a_drafter_at_the_target_needs_one_that_drafts() -> None:
    with pytest.raises(ConfigError, match="method: self needs a target that drafts for itself"):
        engine_of([make_proposer("ngram"), SelfSpeculation()])


def shadow(proposer: Proposer, share: float = 1.0) -> ShadowDrafter:
    return ShadowDrafter(name="shadow", proposer=proposer, share=share, num_draft_tokens=4)


def test_a_shadow_is_scored_and_never_heard() -> None:
    """An oracle would have had all of it accepted; one that is wrong from its third token on, two of four."""
    for wrong_from, rate in ((None, 1.0), (2, 0.5), (0, 0.0)):
        engine, _ = engine_of(
            [make_proposer("ngram")], shadows=[shadow(OracleProposer(wrong_from=wrong_from))]
        )
        made = requests_of(random.Random(2))
        outputs = run(engine, *made)
        for one in made:
            assert tokens_of(outputs[one.request_id]) == expected_tokens(one)
        metrics = engine.metrics()
        counts = metrics.by_shadow["shadow"]
        assert counts.num_requests == len(made)
        assert counts.num_drafts > 10
        assert counts.num_accepted_tokens == pytest.approx(rate * counts.num_draft_tokens, rel=0.1)
        assert set(metrics.by_method()) <= {"ngram"}
        assert 'shadow_num_drafts{drafter="shadow"}' in metrics.snapshot()


def test_a_shadow_says_what_the_drafter_does_once_it_is_heard() -> None:
    made = requests_of(random.Random(9), 8)
    heard, _ = engine_of([make_proposer("ngram"), make_proposer("draft_model")])
    run(heard, *(msgspec.structs.replace(one, drafter="model") for one in made))
    seen, _ = engine_of([make_proposer("ngram")], shadows=[shadow(make_proposer("draft_model"))])
    run(seen, *made)
    real, would_be = heard.metrics().by_drafter["model"], seen.metrics().by_shadow["shadow"]
    rates = [its.num_accepted_tokens / its.num_draft_tokens for its in (real, would_be)]
    assert min(real.num_drafts, would_be.num_drafts) > 20
    assert rates[0] == pytest.approx(rates[1], abs=0.12)


def test_a_shadow_looks_at_its_share_of_requests() -> None:
    lookup = SuffixProposer(SuffixConfig())
    engine, _ = engine_of([make_proposer("ngram")], shadows=[shadow(lookup, 0.3)])
    run(engine, *requests_of(random.Random(4), 40))
    assert 4 <= engine.metrics().by_shadow["shadow"].num_requests <= 20


class TickingClock(ManualClock):
    """Each look at it takes a tenth of a millisecond, whatever else the machine does."""

    def now_s(self) -> float:
        self.advance(1e-4)
        return super().now_s()


def test_the_controller_finds_who_is_right() -> None:
    """A drafter that is always right, behind one that never is: requests soon have the right one."""
    settings = ControllerSettings(max_draft_tokens=4, drafter_caps=(4, 4), trial_share=0.05)
    controller = GoodputController(settings, assumed_profile())
    wrong = OracleProposer(wrong_from=0)
    engine, _ = engine_of([wrong, OracleProposer()], controller=controller, clock=TickingClock())
    for block in range(12):
        made = [
            replace_id(one, f"{block}-{one.request_id}")
            for one in requests_of(random.Random(block), number=6)
        ]
        outputs = run(engine, *made)
        for one in made:
            assert tokens_of(outputs[one.request_id]) == expected_tokens(one)
    counts = engine.metrics().by_drafter
    assert counts["model"].num_drafts > 3 * counts["lookup"].num_drafts > 0


def replace_id(one: Request, name: str) -> Request:
    return msgspec.structs.replace(one, request_id=RequestId(name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path)
    return path


def config_of(folder: Path, **speculative: Any) -> EngineConfig:
    off = {"mode": "off"}
    return EngineConfig.model_validate(
        {
            "target": {"model": str(folder), "dtype": "float32", "compile": off},
            "speculative_config": {"controller": "fixed", "num_speculative_tokens": 4} | speculative,
            "cache": {"num_blocks": 40, "block_size": 4},
            "scheduler": {"max_num_seqs": 4},
        }
    )


def drafters_at(folder: Path) -> list[dict[str, Any]]:
    small = {"method": "draft_model", "model": str(folder), "compile": {"mode": "off"}}
    return [
        {"name": "lookup", "method": "ngram", "prompt_lookup_min": 1},
        {"name": "window", "method": "self", "kv": {"policy": "streaming", "budget": 12, "sink_tokens": 4}},
        {"name": "small", **small, "cache": {"num_blocks": 64}},
        {"name": "new", "method": "suffix", "shadow": 1.0},
    ]


PROMPTS = [[5, 9, 5, 9, 5, 9, 5], [7, 8, 9, 7, 8], [5, 9, 5, 9, 5, 9, 4], [11, 3, 11, 3, 11]]


def generated(engine: Engine, drafters: Sequence[str | None], params: SamplingParams) -> list[list[int]]:
    made = [
        replace_id(request("x", prompt, params, seed=40 + index), f"r{index}")
        for index, prompt in enumerate(PROMPTS)
    ]
    made = [msgspec.structs.replace(one, drafter=name) for one, name in zip(made, drafters, strict=True)]
    outputs = run(engine, *made)
    return [tokens_of(outputs[one.request_id]) for one in made]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafters_here_and_at_the_target_in_one_batch(folder: Path, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
    with Engine(config_of(folder, method="none")) as engine:
        alone = generated(engine, [None] * 4, params)
    with Engine(config_of(folder, method="several", drafters=drafters_at(folder))) as engine:
        assert generated(engine, ["lookup", "window", "small", None], params) == alone
        metrics = engine.metrics()
        counts = metrics.by_drafter
        assert list(counts) == ["lookup", "window", "small"]
        assert (
            counts["small"].num_accepted_tokens == counts["small"].num_draft_tokens > 0
        )  # the target itself
        assert counts["window"].num_accepted_tokens > 0
        assert counts["window"].draft_s > 0.0
        assert metrics.by_shadow["new"].num_drafts > 0
        assert engine.draft_counters


def with_bounded_model(folder: Path) -> list[dict[str, Any]]:
    """The draft model keeps a part of a text, and the target's own drafts attend to all of it."""
    lookup, window, small, new = drafters_at(folder)
    return [lookup, {"name": "window", "method": "self"}, small | {"kv": window["kv"]}, new]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_model_among_others_has_a_budget(folder: Path, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True)
    with Engine(config_of(folder, method="none")) as engine:
        alone = generated(engine, [None] * 4, params)
    drafters = with_bounded_model(folder)
    with Engine(config_of(folder, method="several", drafters=drafters)) as engine:
        assert generated(engine, ["small", "window", "small", "lookup"], params) == alone
        counts = engine.metrics().by_drafter
        # All of the text, and the same model: always right. A part of it is not.
        assert counts["window"].num_accepted_tokens == counts["window"].num_draft_tokens > 0
        assert 0 < counts["small"].num_accepted_tokens < counts["small"].num_draft_tokens
        wide = msgspec.structs.replace(
            request("wide", PROMPTS[0], params, seed=40), drafter="small", kv_budget=100
        )
        before = copy.copy(counts["small"])
        assert tokens_of(run(engine, wide)[wide.request_id]) == alone[0]
        after = engine.metrics().by_drafter["small"]
        num_drafted = after.num_draft_tokens - before.num_draft_tokens
        assert after.num_accepted_tokens - before.num_accepted_tokens == num_drafted > 0
        small = msgspec.structs.replace(wide, request_id=RequestId("too-small"), kv_budget=3)
        with pytest.raises(InputError, match="kv_budget: 3 tokens do not hold"):
            engine.add_request(small)


def test_the_budget_is_that_of_whoever_selects(folder: Path) -> None:
    places = {"window": drafters_at(folder), "small": with_bounded_model(folder)}
    for place, drafters in enumerate(places.values(), start=1):
        config = config_of(folder, method="several", drafters=drafters)
        assert config.speculative_config.budgeted_choice == place
        budgets = kv_budgets_of(config.speculative_config)
        assert budgets is not None
        assert budgets.default.amount == 12
        assert [name for name in places if budgets.is_of(name)] == [budgets.drafter]
        assert budgets.drafter == list(places)[place - 1]


MIXED = [
    PROMPTS[0],
    [number % 23 + 3 for number in range(70)],
    PROMPTS[3],
    [number * number % 29 + 3 for number in range(90)],
    [5, 9] * 20,
]
"""Short ones and long ones."""
BUDGETS = {"policy": "streaming", "budget": [12, 24, "50%"], "sink_tokens": 4, "floor": 12}


def mixed_engine(folder: Path, selecting: str | None, **more: Any) -> Engine:
    """Of several drafters `selecting` has a list of budgets; None: nobody drafts."""
    if selecting is None:
        config = config_of(folder, method="none")
    else:
        lookup, window, small, _ = drafters_at(folder)
        window = {"name": "window", "method": "self"}
        bounded = [one | {"kv": BUDGETS} if one["name"] == selecting else one for one in (window, small)]
        config = config_of(folder, method="several", drafters=[lookup, *bounded], **more)
    cache = config.cache.model_copy(update={"num_blocks": 96})
    return Engine(config.model_copy(update={"cache": cache}))


def mixed_requests(temperature: float, selecting: str) -> list[Request]:
    """Some with a budget, a drafter, or both of their own; `selecting` is the drafter that has budgets."""
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    made = [
        replace_id(request("x", prompt, params, seed=60 + index), f"r{index}")
        for index, prompt in enumerate([*MIXED, *MIXED])
    ]
    made[3] = msgspec.structs.replace(made[3], kv_budget=20)
    made[6] = msgspec.structs.replace(made[6], drafter="window")
    made[8] = msgspec.structs.replace(made[8], drafter=selecting, kv_budget="75%")
    return made


def watch_budgets(engine: Engine, selecting: str) -> dict[RequestId, list[int]]:
    """Return what the drafts of each request are told to attend to, where they are made."""
    seen: dict[RequestId, list[int]] = {}
    if selecting == "window":
        target = engine._parts.target
        submit = target.submit

        def watched_submit(step: TargetStep) -> None:
            for work in step.works:
                if work.num_self_drafted:
                    seen.setdefault(work.request_id, []).append(work.kv_budget)
            submit(step)

        target.submit = watched_submit  # type: ignore[method-assign]
    else:
        proposer = engine._parts.proposer
        assert isinstance(proposer, SeveralProposers)
        small = proposer.members[2]
        propose = small.propose

        def watched_propose(views: Any, budgets: Any) -> Any:
            for view in views:
                seen.setdefault(view.request_id, []).append(view.kv_budget)
            return propose(views, budgets)

        small.propose = watched_propose  # type: ignore[method-assign]
    return seen


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("selecting", ["window", "small"])
def test_drafters_and_budgets_change_at_run_time_and_no_token_does(
    folder: Path, selecting: str, temperature: float
) -> None:
    """Each request gets another drafter, and another budget of it, every few rounds."""
    made = mixed_requests(temperature, selecting)
    with mixed_engine(folder, None) as engine:
        alone = run(engine, *(msgspec.structs.replace(one, drafter=None, kv_budget=None) for one in made))
    rng = random.Random(11)
    with mixed_engine(folder, selecting) as engine:
        parts = engine._parts
        assert parts.drafters is not None
        assert parts.kv_budgets is not None
        had: dict[RequestId, tuple[int, KvBudget]] = {}
        options = parts.kv_budgets._config.budgets

        def picked(request_id: RequestId) -> tuple[int, KvBudget]:
            if request_id not in had:  # drawn once, however often it is asked
                had[request_id] = rng.randrange(3), rng.choice(options)
            return had[request_id]

        parts.drafters.pick = lambda request_id, _: picked(request_id)[0]
        parts.kv_budgets.pick = lambda request_id, _: picked(request_id)[1]
        seen = watch_budgets(engine, selecting)
        for one in made:
            engine.add_request(one)
        outputs: dict[str, list[Any]] = {one.request_id: [] for one in made}
        while engine.has_work:
            if rng.random() < 0.5:
                had.clear()
            for output in engine.step():
                outputs[output.request_id].append(output)
            engine.check_integrity()
        counts = engine.metrics().by_drafter
    for one in made:
        name = one.request_id
        assert tokens_of(outputs[name]) == tokens_of(alone[name]), name
    assert min(its.num_draft_tokens for its in counts.values()) > 0
    assert min(counts[name].num_accepted_tokens for name in ("window", "small")) > 0
    of_picks = {
        budget for number in (0, 1, 2, 4, 5, 6, 7, 9) for budget in seen.get(RequestId(f"r{number}"), [])
    }
    assert {12, 24} < of_picks, "and half of long texts"
    assert max(of_picks) > 24
    assert set(seen.get(RequestId("r3"), [20])) == {20}
    assert min(seen[RequestId("r8")]) >= 0.75 * len(made[8].prompt_token_ids)
    if selecting == "window":
        assert {12, 24} <= set(seen[RequestId("r6")]), "its budget is picked, its drafter is not"


@pytest.mark.usefixtures("one_thread")
def test_the_mean_budget_is_that_of_those_who_have_the_drafter_with_budgets(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with mixed_engine(folder, "window") as engine:
        for index, (drafter, budget) in enumerate([("window", 20), ("window", 30), ("lookup", None)]):
            one = replace_id(request("x", MIXED[0], params), f"r{index}")
            engine.add_request(msgspec.structs.replace(one, drafter=drafter, kv_budget=budget))
        while engine.metrics().num_running < 3:
            engine.step()
        assert engine.metrics().snapshot()["speculation_mean_kv_budget"] == 25.0


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("selecting", ["window", "small"])
def test_what_the_controller_picks_of_drafters_and_budgets_says_the_same(
    folder: Path, selecting: str, temperature: float
) -> None:
    made = mixed_requests(temperature, selecting)
    with mixed_engine(folder, None) as engine:
        alone = run(engine, *(msgspec.structs.replace(one, drafter=None, kv_budget=None) for one in made))
    with mixed_engine(folder, selecting, controller="goodput", profile_seconds=0.0) as engine:
        parts = engine._parts
        assert parts.kv_budgets is not None
        assert parts.kv_budgets.pick is not None
        outputs = run(engine, *made)
        assert sum(its.num_draft_tokens for its in engine.metrics().by_drafter.values()) > 0
    for one in made:
        assert tokens_of(outputs[one.request_id]) == tokens_of(alone[one.request_id])


@pytest.mark.full
def test_costs_of_each_are_measured_and_kept(folder: Path, tmp_path: Path) -> None:
    measured = {"controller": "goodput", "profile_seconds": 1.0, "profile_dir": str(tmp_path)}
    config = config_of(folder, method="several", drafters=drafters_at(folder), **measured)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with Engine(config_of(folder, method="none")) as engine:
        alone = generated(engine, [None] * 4, params)
    for _ in range(2):
        with Engine(config) as engine:
            assert generated(engine, [None] * 4, params) == alone
        (kept,) = tmp_path.iterdir()
    assert len(msgspec.json.decode(kept.read_bytes())["other_drafts"]) == 2
