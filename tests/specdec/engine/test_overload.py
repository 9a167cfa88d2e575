"""Goodput under load, on a clock that rounds move: what is refused in time costs nothing to who is served."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from specdec.core.clock import ManualClock
from specdec.core.errors import CapacityError, LateError
from specdec.core.request import LatencyTarget, Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyTarget, ToyTokenizer
from specdec.proposers.none import NoProposer
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from tests.specdec.engine.toy_engines import MODEL, VOCAB_SIZE, request

TTFT_S = 2.0
ROUND_S = 0.05
NUM_TOKENS = 20
NUM_PLACES = 4
CAPACITY_PER_S = NUM_PLACES / (ROUND_S * (NUM_TOKENS + 1))


def toy_engine(clock: ManualClock, *, refuse_late: bool = True) -> Engine:
    return Engine.from_parts(
        target=ToyTarget(MODEL),
        proposer=NoProposer(),
        tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE),
        scheduler=SchedulerConfig(
            max_num_seqs=NUM_PLACES, max_num_batched_tokens=64, refuse_late=refuse_late
        ),
        controller=FixedController(0),
        clock=clock,
        prefix_caching=False,
    )


def asking(number: int, ttft_s: float | None = TTFT_S, max_tokens: int = NUM_TOKENS) -> Request:
    one = request(f"r{number}", params=SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    return one if ttft_s is None else msgspec.structs.replace(one, slo=LatencyTarget(ttft_ms=1000.0 * ttft_s))


def goodput(
    load: float,
    *,
    refuse_late: bool = True,
    seed: int = 1,
    disturbance: float = 0.0,
    slower: float = 1.0,
) -> tuple[float, Counter[str]]:
    """Return good requests per second at a share of capacity, and what became of all, once rates are known.

    With a disturbance, rounds take longer by up to that share, another one every other second: somebody else
    uses the machine, too. `slower`: by so much from when they are counted on.
    """
    generator, clock = random.Random(seed), ManualClock()
    troubles = random.Random(seed + 1)
    slowness, until_s = 1.0, 0.0
    engine = toy_engine(clock, refuse_late=refuse_late)
    duration_s, ramp_s = 70.0, 15.0
    next_s, number = 0.0, 0
    arrived_s: dict[str, float] = {}
    outcomes: Counter[str] = Counter()
    num_good = 0
    while clock.now_s() < duration_s:
        while next_s <= clock.now_s():
            number += 1
            one = asking(number)
            try:
                engine.add_request(one)
            except CapacityError:
                outcomes["refused"] += next_s > ramp_s
            else:
                arrived_s[one.request_id] = next_s
            next_s += generator.expovariate(load * CAPACITY_PER_S)
        if clock.now_s() >= until_s:
            slowness, until_s = 1.0 + troubles.uniform(0.0, disturbance), until_s + 2.0
        usual = ROUND_S * (slower if clock.now_s() > ramp_s else 1.0)
        clock.advance(slowness * usual)
        for output in engine.step():
            if output.finish_reason is not None:
                assert output.stats is not None
                assert output.stats.first_token_s is not None
                is_good = output.stats.first_token_s - arrived_s[output.request_id] <= TTFT_S
                outcomes["good" if is_good else "late"] += arrived_s[output.request_id] > ramp_s
                num_good += is_good and clock.now_s() > ramp_s
    return num_good / (duration_s - ramp_s), outcomes


def test_goodput_at_five_times_the_load_is_that_of_full_load() -> None:
    peak = max(goodput(load)[0] for load in (0.7, 0.9, 1.1))
    overloaded, outcomes = goodput(5.0)
    assert peak == pytest.approx(CAPACITY_PER_S, rel=0.15)
    assert overloaded >= 0.9 * peak, (overloaded, peak, outcomes)
    assert outcomes["refused"] > outcomes["good"]
    without, _ = goodput(5.0, refuse_late=False)
    assert without < 0.1 * peak, "this load would be no trouble"


def step_for(engine: Engine, clock: ManualClock, num_rounds: int) -> None:
    for _ in range(num_rounds):
        clock.advance(ROUND_S)
        engine.step()


def saturated(clock: ManualClock) -> Engine:
    """Return an engine that has served many, of whom others are left and more wait."""
    engine = toy_engine(clock)
    for number in range(20 * NUM_PLACES):
        engine.add_request(asking(number, None))
    step_for(engine, clock, 15 * (NUM_TOKENS + 1))
    assert engine.metrics().num_waiting > 0
    assert engine.metrics().queue_wait_s > 0.0
    return engine


def test_nobody_is_waited_for_who_was_taken_back() -> None:
    """All at once, as when the only door dies: no round comes behind that."""
    clock = ManualClock()
    engine = saturated(clock)
    seconds_per_request = engine._rates.seconds_per_request
    for number in range(20 * NUM_PLACES):
        engine.abort(request(f"r{number}").request_id)
    engine.step()
    assert not engine.has_work
    assert engine.metrics().queue_wait_s == 0.0
    clock.advance(3600.0)
    engine.add_request(asking(1000, ttft_s=0.01))
    step_for(engine, clock, NUM_TOKENS + 1)
    for number in range(2000, 2000 + 4 * NUM_PLACES):
        engine.add_request(asking(number, None))
    step_for(engine, clock, 2 * (NUM_TOKENS + 1))
    assert engine._rates.seconds_per_request == pytest.approx(seconds_per_request, rel=0.1)


def test_places_that_have_just_come_free_are_free() -> None:
    """Who began together ends together: those who wait next are in time, be it that others wait, too."""
    clock = ManualClock()
    engine = toy_engine(clock)
    for number in range(6 * NUM_PLACES):
        engine.add_request(asking(number, None))
    num_ended = 0
    while num_ended < 5 * NUM_PLACES:
        clock.advance(ROUND_S)
        num_ended += sum(output.finish_reason is not None for output in engine.step())
    assert (engine.metrics().num_running, engine.metrics().num_waiting) == (0, NUM_PLACES)
    with pytest.raises(LateError):  # one lump later
        engine.add_request(asking(1000, ttft_s=0.5))
    for number in range(6 * NUM_PLACES - 1, 5 * NUM_PLACES, -1):  # all that wait but one
        engine.abort(request(f"r{number}").request_id)
    for number in range(1001, 1000 + NUM_PLACES):
        engine.add_request(asking(number, ttft_s=0.5))
    with pytest.raises(LateError):
        engine.add_request(asking(1000 + NUM_PLACES, ttft_s=0.5))


def test_with_room_to_spare_hardly_anybody_is_refused() -> None:
    _, outcomes = goodput(0.5)
    assert outcomes["refused"] <= 0.01 * outcomes["good"]
    assert outcomes["late"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_on_a_machine_that_others_use_few_are_late(seed: int) -> None:
    """How far waits turn out to be from what was foreseen becomes the margin: a fixed one is too small."""
    _, outcomes = goodput(5.0, seed=seed, disturbance=1.5)
    assert outcomes["late"] <= 0.08 * outcomes["good"], outcomes


@pytest.mark.parametrize("seed", range(3))
def test_who_comes_when_rounds_become_slower_is_told_by_what_they_take_now(seed: int) -> None:
    """Only those are late who waited already when it happened; with finished requests alone twice as many."""
    _, outcomes = goodput(5.0, seed=seed, slower=1.6)
    assert outcomes["late"] <= NUM_PLACES, outcomes
