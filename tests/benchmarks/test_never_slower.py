"""The arithmetic of the comparison, the plan, and that counted rounds are those of a batch that stays."""

from __future__ import annotations

import itertools
import math
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer
from rich.console import Console
from scipy import stats

from benchmarks.deployments import Deployment, ExchangedController, Setting
from benchmarks.load_step import StepPlan, play
from benchmarks.load_step import summarise as summarise_step
from benchmarks.never_slower import (
    FULL,
    QUICK,
    Bench,
    Cell,
    fails_anywhere,
    failures_of,
    headlines_of,
    only,
    summarise,
    table_of,
)
from benchmarks.report import PairedRatio, to_plain
from benchmarks.steady import SPARE_TOKENS, Batch, Counted, decode_for, read
from benchmarks.turns import LIMIT, Turns
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyTarget, ToyTokenizer
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController, SpeculationController
from tests.specdec.engine.toy_engines import MODEL, VOCAB_SIZE, make_proposer


def test_bounds_are_those_of_students_t() -> None:
    values = (0.95, 1.01, 0.99, 1.04, 0.97, 0.98)
    ratio = PairedRatio(values)
    logs = [math.log(value) for value in values]
    low, high = stats.t.interval(0.90, len(logs) - 1, loc=sum(logs) / len(logs), scale=stats.sem(logs))
    assert ratio.lower == pytest.approx(math.exp(low), rel=1e-3)
    assert ratio.upper == pytest.approx(math.exp(high), rel=1e-3)
    assert ratio.lower < ratio.median < ratio.upper
    for number in range(2, 22):
        one = PairedRatio((1.0,) * (number - 1) + (1.1,))
        logs = [math.log(value) for value in one.values]
        high = stats.t.interval(0.90, number - 1, loc=sum(logs) / number, scale=stats.sem(logs))[1]
        assert one.upper == pytest.approx(math.exp(high), rel=1e-3)


def test_a_single_pair_says_nothing() -> None:
    assert PairedRatio((0.5,)).upper == math.inf
    assert PairedRatio((0.5,)).lower == 0.0


def turns_of(controller: float, plain: float, best: float | None, number: int = 5) -> Turns:
    def counted(rate: float, wobble: float) -> list[Counted]:
        return [
            Counted(num_tokens=round(1000 * rate), seconds=1000.0 * (1.0 + wobble * (index % 2)))
            for index in range(number)
        ]

    turns = Turns({"plain": counted(plain, 0.01), "controller": counted(controller, 0.02)})
    if best is not None:
        turns.counted["best"] = counted(best, 0.01)
    return turns


def a_cell(controller: float, plain: float, best: float | None, cold: float = 1.0) -> dict[str, Any]:
    return {
        "cell": Cell(deployment="colocated", batch=4, context=128, acceptance=0.5),
        "best": "plain" if best is None else "lockstep, k = 2",
        "cold": {"vs_plain": (1.0, cold)},
        "chosen": {"mode": "lockstep", "mean_num_draft_tokens": 2.0, "reason": "gain"},
        **summarise(turns_of(controller, plain, best)),
    }


def test_variants_take_turns_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.stolen.stolen_seconds", lambda: 0.0)
    turns, order = Turns(), list[str]()

    def decode(name: str) -> Counted:
        order.append(name)
        return Counted(num_tokens=len(order), seconds=1.0)

    for _ in range(6):
        turns.take({name: partial(decode, name) for name in ("a", "b", "c")})
    assert "".join(order) == "abccba" + "bcaacb" + "cabbac"
    assert turns.rates("c", "d") == {"c": (3.0, 4.0, 8.0, 11.0, 13.0, 18.0)}
    assert turns.ratio("a", "b").values == (1 / 2, 6 / 5, 9 / 7, 10 / 12, 14 / 15, 17 / 16)


def test_variants_of_a_turn_draw_verdicts_from_the_same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: dict[int | None, int] = {}

    def decode(engine: None, batch: Batch, seconds: float, *, is_cold: bool = False) -> Counted:
        seeds[batch.seed] = seeds.get(batch.seed, 0) + 1
        return Counted(num_tokens=10, seconds=1.0)

    monkeypatch.setattr("benchmarks.never_slower.decode_for", decode)
    monkeypatch.setattr("benchmarks.stolen.stolen_seconds", lambda: 0.0)
    deployment = SimpleNamespace(
        synthetic=SimpleNamespace(acceptance=None),
        settings=(Setting(num_draft_tokens=2),),
        exchanged=ExchangedController(),
        engine=None,
        controller=lambda: FixedController(1),
    )
    bench = Bench(QUICK, cast("Deployment", deployment), ())
    monkeypatch.setattr(bench, "_prompts", lambda cell: ((1,),))
    bench.cell(QUICK.cells[0], lambda: None)
    num_unpaired = seeds.pop(None)
    assert num_unpaired > 0
    assert seeds == dict.fromkeys(range(QUICK.pairs), 3)


def test_a_cell_fails_only_where_it_is_slower_for_sure() -> None:
    good, bad = a_cell(99.0, 60.0, 100.0), a_cell(90.0, 60.0, 100.0)
    assert good["vs_plain"].median > 1.6
    assert failures_of([good]) == []
    (failure,) = failures_of([bad])
    assert [fails_anywhere(cell) for cell in (good, bad)] == [False, True]
    assert "vs_best_fixed 0.9" in failure
    slower_than_plain = a_cell(90.0, 100.0, None)
    assert slower_than_plain["vs_plain"] == slower_than_plain["vs_best_fixed"]
    assert len(failures_of([slower_than_plain])) == 2


def test_headlines_are_the_worst_upper_bounds() -> None:
    cells = [a_cell(99.0, 60.0, 100.0, cold=0.98), a_cell(95.0, 60.0, 100.0, cold=0.99)]
    step = {"worst_phase": 0.99, "worst_bin": 0.9}
    headlines = headlines_of(cells, [step])
    assert headlines["worst_vs_best_fixed"] == cells[1]["vs_best_fixed"].upper < LIMIT
    assert headlines["worst_vs_best_fixed_median"] == pytest.approx(0.95, abs=0.01)
    assert headlines["worst_vs_plain"] > 1.5
    assert headlines["cold_vs_plain"] == 0.98
    assert headlines["load_step_worst_second"] == 0.9
    assert "load_step_worst_phase" not in headlines_of(cells, [])
    Console(file=None, quiet=True).print(table_of(cells))
    plain = to_plain(cells[0]["vs_plain"])
    assert set(plain) == {"median", "lower", "upper", "values"}


def test_the_plan_is_what_is_asked_for() -> None:
    for name in ("colocated", "two groups"):
        cells = {
            (cell.batch, cell.context, cell.acceptance) for cell in FULL.cells if cell.deployment == name
        }
        assert len(cells) == 48
        assert {batch for batch, _, _ in cells} == {1, 4, 16, 64}
        assert {rate for _, _, rate in cells} == {0.2, 0.5, 0.8, 0.95}
    assert FULL.pairs >= 5
    assert QUICK.pairs >= 5
    assert len(QUICK.cells) == 6
    assert FULL.scale.max_model_len <= 4096
    assert FULL.scale.target_cache_bytes + FULL.scale.draft_cache_bytes < 7e9


def test_a_part_of_the_plan() -> None:
    one = only(FULL, "^two groups, 4 x 128, acceptance 0.5")
    assert [(cell.deployment, cell.batch, cell.context) for cell in one.cells] == [("two groups", 4, 128)]
    assert one.steps == ()
    steps = only(FULL, "^load step")
    assert (steps.cells, steps.deployments) == ((), ("colocated", "two groups"))
    assert steps.scale.max_num_seqs == 64
    assert steps.scale.max_model_len >= 256
    assert set(headlines_of([], [{"worst_phase": 0.99, "worst_bin": 0.9}])) == {
        "load_step_worst_phase",
        "load_step_worst_second",
    }
    with pytest.raises(typer.BadParameter, match="none of 96 cells and 2 load steps"):
        only(FULL, "three groups")


def an_engine(proposer: str, controller: SpeculationController) -> Engine:
    return Engine.from_parts(
        target=ToyTarget(MODEL, num_blocks=1024, max_model_len=256),
        proposer=make_proposer(proposer),
        tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        controller=controller,
    )


@pytest.mark.parametrize("k", [0, 3])
def test_what_is_counted_is_the_batch_that_stays(k: int) -> None:
    """Every counted round has everybody in it: plain decoding counts one token each."""
    exchanged = ExchangedController()
    engine = an_engine("draft_model", exchanged)
    exchanged.current = Setting(num_draft_tokens=k).controller()
    batch = Batch(prompts=[(1, 2, 3), (4, 5), (1, 1)], num_tokens=60)
    read(engine, batch.prompts, lambda: None)
    counted = decode_for(engine, batch, 0.01)
    assert counted.num_rounds > 0
    assert counted.seconds > 0.0
    if k == 0:
        assert counted.num_tokens == 3 * counted.num_rounds
    else:
        assert counted.num_tokens > 3 * counted.num_rounds
    assert not engine.has_work
    engine.check_integrity()
    with pytest.raises(ValueError, match="too few"):
        decode_for(engine, Batch(prompts=[(1, 2)], num_tokens=3), 0.01)


def test_the_load_rises_and_falls() -> None:
    engine = an_engine("none", FixedController(0))
    plan = StepPlan(low_s=0.1, high_s=0.3, bin_s=0.1, high=4, prompt_tokens=3, num_tokens=5)
    assert [plan.wanted(at) for at in (0.0, 0.05, 0.15, 0.39, 0.45)] == [1, 1, 4, 4, 1]
    most = 0
    step = engine.step

    def watched() -> Any:
        nonlocal most
        most = max(most, engine.metrics().num_running)
        return step()

    engine.step = watched  # type: ignore[method-assign]
    rates = play(engine, plan, [(1, 2, 3), (3, 4, 5)])
    assert len(rates) == 5
    assert sum(rates) > 0.0
    assert most == 4
    assert not engine.has_work
    engine.check_integrity()


def test_requests_of_the_load_step_end_one_after_the_other() -> None:
    """Half to one and a half times as long, whichever of them run together."""
    plan = StepPlan(num_tokens=128)
    for first in (0, 1, 64, 1000):
        lengths = sorted(plan.length_of(number) for number in range(first, first + 64))
        assert 64 <= lengths[0] <= 68
        assert 188 <= lengths[-1] <= 192
        assert max(after - before for before, after in itertools.pairwise(lengths)) <= 6


def test_the_load_step_is_compared_by_second_and_by_phase() -> None:
    plan = StepPlan(low_s=1.0, high_s=2.0, bin_s=1.0)
    summary = summarise_step(
        plan,
        {
            "plain": [[10.0, 100.0, 100.0, 10.0], [10.0, 100.0, 100.0, 10.0]],
            "controller": [[20.0, 50.0, 150.0, 9.0], [20.0, 50.0, 150.0, 9.0]],
        },
    )
    assert summary["ratios"] == [2.0, 0.5, 1.5, 0.9]
    assert summary["phases"] == {"low": 2.0, "high": 1.0, "low again": 0.9}
    assert (summary["worst_bin"], summary["worst_phase"]) == (0.5, 0.9)


def test_room_is_left_for_the_last_round() -> None:
    assert 2 * (1 + max(FULL.scale.lengths)) < SPARE_TOKENS
