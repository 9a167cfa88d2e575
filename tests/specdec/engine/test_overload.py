"""Goodput under load, on a clock that rounds move: what is refused in time costs nothing to who is served."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from specdec.core.clock import ManualClock
from specdec.core.errors import CapacityError
from specdec.core.request import LatencyTarget
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
    engine = Engine.from_parts(
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
    duration_s, ramp_s = 70.0, 15.0
    next_s, number = 0.0, 0
    arrived_s: dict[str, float] = {}
    outcomes: Counter[str] = Counter()
    num_good = 0
    while clock.now_s() < duration_s:
        while next_s <= clock.now_s():
            number += 1
            one = request(f"r{number}", params=SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
            one = msgspec.structs.replace(one, slo=LatencyTarget(ttft_ms=1000.0 * TTFT_S))
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
