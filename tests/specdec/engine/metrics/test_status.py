"""What an engine says about itself: the choice, the reason in words, what the last seconds have brought."""

from __future__ import annotations

import dataclasses
import random
from typing import get_args

import pytest

from specdec.core.clock import ManualClock
from specdec.engine.metrics.engine_metrics import EngineMetrics
from specdec.engine.metrics.status import StatusKeeper
from specdec.scheduling.speculation.explanation import (
    BOUNDS_IN_WORDS,
    IN_WORDS,
    Bound,
    ControllerState,
    Reason,
)
from specdec.transport.memory import Faults
from specdec.transport.status import TargetGroupStatus
from tests.specdec.engine.remote_cluster import Cluster, a_request


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def keeper(clock: ManualClock) -> StatusKeeper:
    return StatusKeeper(clock, max_num_running=8, incarnation=2)


def rounds(metrics: EngineMetrics, count: int, *, num_accepted: int) -> None:
    """Count rounds of 20 ms with 4 draft tokens each."""
    for _ in range(count):
        metrics.num_rounds += 1
        metrics.generation_tokens += num_accepted + 1
        metrics.count_draft(4, num_accepted)
        metrics.round_s += 0.02
        metrics.verify_s += 0.012
        metrics.drafting_s += 0.01
        metrics.hidden_drafting_s += 0.004
        metrics.draft_s += 0.006
        metrics.coordinator_s += 0.002


def test_every_reason_has_words() -> None:
    assert IN_WORDS.keys() == set(get_args(Reason))
    assert BOUNDS_IN_WORDS.keys() == {*get_args(Bound)} - {"none"}


def test_without_rounds_there_is_nothing_recent(keeper: StatusKeeper) -> None:
    status = keeper.take(EngineMetrics(num_waiting=3), {})
    assert status.recent is None
    assert (status.incarnation, status.max_num_running, status.num_waiting) == (2, 8, 3)
    assert status.choice is not None
    assert (status.choice.reason, status.choice.expected_tokens_per_s) == ("idle", None)


def test_recent_rounds_are_measured_without_idle_time(keeper: StatusKeeper, clock: ManualClock) -> None:
    metrics = EngineMetrics()
    rounds(metrics, 50, num_accepted=2)
    clock.advance(5.0)
    recent = keeper.take(metrics, {"speculation_cache_hits": 30.0, "speculation_cache_misses": 20.0}).recent
    assert recent is not None
    assert recent.num_rounds == 50
    assert recent.tokens_per_s == pytest.approx(150.0)
    assert (recent.acceptance, recent.mean_acceptance_length) == (0.5, 3.0)
    assert recent.hidden_share == pytest.approx(0.4)
    assert recent.hit_rate == pytest.approx(0.6)
    times = (recent.round_s, recent.draft_s, recent.draft_wait_s, recent.verify_s, recent.coordinator_s)
    assert times == pytest.approx((0.02, 0.01, 0.006, 0.012, 0.002))


def test_a_target_is_as_busy_as_its_engine_says(keeper: StatusKeeper) -> None:
    assert keeper.take(EngineMetrics(target_utilization=0.25), {}).utilization == 0.25


def test_acceptance_is_told_by_who_drafted(keeper: StatusKeeper, clock: ManualClock) -> None:
    metrics = EngineMetrics(method="draft_model")
    rounds(metrics, 10, num_accepted=4)
    keeper.take(metrics, {})
    clock.advance(11.0)
    keeper.take(metrics, {})
    rounds(metrics, 10, num_accepted=3)
    rounds(metrics, 10, num_accepted=1)
    for _ in range(10):
        metrics.count_other_method("ngram", 4, 1)
    clock.advance(1.0)
    recent = keeper.take(metrics, {}).recent
    assert recent is not None
    assert recent.acceptance == 0.5
    assert recent.acceptance_by_method == {"draft_model": 0.75, "ngram": 0.25}


def test_what_was_long_ago_is_forgotten(keeper: StatusKeeper, clock: ManualClock) -> None:
    metrics = EngineMetrics()
    rounds(metrics, 50, num_accepted=0)
    for _ in range(30):
        clock.advance(0.5)
        keeper.take(metrics, {})
    assert keeper.take(metrics, {}).recent is None
    rounds(metrics, 10, num_accepted=4)
    clock.advance(0.5)
    recent = keeper.take(metrics, {}).recent
    assert recent is not None
    assert (recent.num_rounds, recent.acceptance) == (10, 1.0)


STATE = ControllerState(
    mode="ping_pong",
    is_speculating=True,
    reason="gain",
    mean_num_draft_tokens=1.5,
    num_requests_by_k=(1, 0, 1, 1),
    goodput_on=80.0,
    goodput_off=50.0,
    goodput_by_mode=(("lockstep", 70.0), ("ping_pong", 80.0)),
    draft_s=0.01,
    verify_s=0.02,
    round_s=0.03,
    acceptance=(0.8, 0.6, 0.5),
    pool_worth=1.6,
    bounded_by="batch_size",
)


@pytest.mark.parametrize(("is_speculating", "expected"), [(True, 80.0), (False, 50.0)])
def test_the_choice_comes_with_what_was_expected_of_it(
    keeper: StatusKeeper, is_speculating: bool, expected: float
) -> None:
    metrics = EngineMetrics(speculation=dataclasses.replace(STATE, is_speculating=is_speculating))
    choice = keeper.take(metrics, {}).choice
    assert choice is not None
    assert choice.expected_tokens_per_s == expected
    assert choice.expected_tokens_per_s_by_mode == {"lockstep": 70.0, "ping_pong": 80.0, "plain": 50.0}
    assert choice.num_requests_by_k == {0: 1, 2: 1, 3: 1}
    assert choice.explanation == IN_WORDS["gain"]
    assert (choice.pool_worth, choice.expected_acceptance) == (1.6, (0.8, 0.6, 0.5))
    assert choice.bounded_by == "batch_size"


def status_of(cluster: Cluster, keeper: StatusKeeper) -> TargetGroupStatus:
    return keeper.take(cluster.engine.metrics(), cluster.engine.draft_counters, cluster.proposer.links)


def test_an_engine_with_draft_workers_that_come_and_go() -> None:
    cluster = Cluster(Faults(), num_drafters=2, mode="draft_ahead")
    keeper = StatusKeeper(cluster.clock, max_num_running=4)
    rng = random.Random(3)
    for index in range(4):
        cluster.engine.add_request(a_request(f"r{index}", rng))
    tokens: dict[str, list[int]] = {f"r{index}": [] for index in range(4)}
    for _ in range(3):
        cluster.step(tokens)  # type: ignore[arg-type]
    status = status_of(cluster, keeper)
    assert status.choice is not None
    assert (status.choice.mode, status.choice.reason) == ("draft_ahead", "configured")
    assert 0 < sum(status.choice.num_requests_by_k.values()) <= status.num_running
    assert sum(link.num_requests for link in status.draft_workers) == status.num_running
    assert all(link.is_waited_for for link in status.draft_workers)
    gone = next(iter(cluster.drafters))
    cluster.stop_drafter(gone, told=False)
    while cluster.engine.has_work:
        cluster.step(tokens)  # type: ignore[arg-type]
    lost = [link.worker for link in status_of(cluster, keeper).draft_workers if not link.is_waited_for]
    assert lost in ([gone], [])
