"""The simulated cluster: nothing is lost, queues behave as theory says, and the same seed is the same run."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.progress import Progress

from benchmarks.report import environment, to_plain
from benchmarks.simulate import FULL, Plan, headlines_of, simulate
from benchmarks.simulate_tables import write_tables
from benchmarks.simulation.clock import EventQueue
from benchmarks.simulation.cluster import Cluster, ClusterSpec, Failure
from benchmarks.simulation.drafter import DraftMessage, DraftReply, DraftWish, DraftWorker
from benchmarks.simulation.equal_devices import Cell, EqualDevicesPlan
from benchmarks.simulation.experiments import (
    FailurePlan,
    LoadPlan,
    ModesPlan,
    PoolPlan,
    ScalingPlan,
    endure,
    fixed,
    goodput,
)
from benchmarks.simulation.group import GroupLimits
from benchmarks.simulation.hardware import LLAMA_1B, LLAMA_70B, Hardware, Placement, llama_pair
from benchmarks.simulation.plots import draw
from benchmarks.simulation.pool_rule import Situation, bare_times, fewest_workers, fitted_x
from benchmarks.simulation.traffic import (
    CHAT,
    Lengths,
    LoadStep,
    SimulatedRequest,
    Source,
    Trace,
    arrival_times,
)
from benchmarks.simulation.verdicts import GUESS_RATES, play_round
from specdec.core.errors import UserError
from specdec.core.ids import RequestId
from specdec.engine.draft_pool.placement import DraftPlacementConfig
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.scheduling.speculation.modes import OverlapMode

MODES: tuple[OverlapMode, ...] = ("lockstep", "ping_pong", "draft_ahead")
SHORT = Trace(
    name="short",
    prompt=Lengths(median=200, mean=300),
    output=Lengths(median=30, mean=50),
    acceptance=0.7,
)


def spec_of(mode: OverlapMode = "lockstep", k: int = 4, **changes: object) -> ClusterSpec:
    spec = ClusterSpec(
        hardware=llama_pair(),
        controller=fixed(k, mode),
        trace=SHORT,
        num_pools=2,
        groups_per_pool=2,
        workers_per_pool=2,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def check_books(cluster: Cluster) -> None:
    """Every request has ended once with all its tokens, and nobody holds anything."""
    ledger = cluster.ledger
    assert len(ledger.finished) == ledger.num_arrived > 0
    finished = ledger.finished.values()
    assert all(one.num_generated == one.num_to_generate for one in finished)
    assert sum(ledger.tokens_by_second) == sum(one.num_to_generate - one.first_generated for one in finished)
    for group in cluster.groups:
        assert group.load == 0
        group.check_integrity()
        assert all(link.num_registered == 0 for link in group.links.links.values())
    cluster.run(cluster.events.now_s + 1.0)
    assert all(worker.num_sequences == 0 for workers in cluster.workers for worker in workers)


@pytest.mark.parametrize("mode", MODES)
def test_every_request_ends_once_and_tokens_add_up(mode: OverlapMode) -> None:
    cluster = Cluster(spec_of(mode), seed=1)
    cluster.send_traffic([LoadStep(start_s=0.0, rate=60.0)], end_s=4.0)
    cluster.run(4.0)
    cluster.drain(limit_s=60.0)
    check_books(cluster)
    assert cluster.ledger.num_replays == 0
    assert sum(group.counts.accepted for group in cluster.groups) > 0


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_lost_whoever_dies(mode: OverlapMode) -> None:
    cluster = Cluster(spec_of(mode), seed=2)
    cluster.send_traffic([LoadStep(start_s=0.0, rate=60.0)], end_s=12.0)
    cluster.fail(
        [
            Failure(what="draft_worker", index=0, at_s=1.0, down_s=8.0),
            *(Failure(what="draft_worker", index=index, at_s=2.0, down_s=3.0) for index in (2, 3)),
            Failure(what="target_group", index=1, at_s=3.0, down_s=2.0),
            *(Failure(what="target_group", index=index, at_s=6.0, down_s=1.0) for index in range(4)),
        ]
    )
    cluster.run(12.0)
    cluster.drain(limit_s=120.0)
    check_books(cluster)
    assert cluster.ledger.num_replays > 0
    assert sum(group.counts.draft_misses for group in cluster.groups) > 0


def test_a_request_that_is_lost_is_noticed() -> None:
    """The negative control: books do not balance by themselves."""
    cluster = Cluster(spec_of(), seed=3)
    cluster.send_traffic([LoadStep(start_s=0.0, rate=60.0)], end_s=2.0)
    cluster.run(1.5)
    assert cluster.groups[0].die()  # and nobody takes them
    with pytest.raises(AssertionError, match="starves"):
        cluster.drain(limit_s=20.0)


def test_memory_that_is_short_costs_preemptions_and_no_tokens() -> None:
    hardware = llama_pair()
    small = replace(hardware, target=replace(hardware.target, memory_share=0.2253))
    assert 5000 < small.target.kv_tokens < 20_000
    trace = replace(SHORT, prompt=Lengths(median=50, mean=60), output=Lengths(median=300, mean=400))
    cluster = Cluster(spec_of(hardware=small, trace=trace, num_pools=1, groups_per_pool=1), seed=4)
    cluster.send_traffic([LoadStep(start_s=0.0, rate=60.0)], end_s=3.0)
    cluster.run(3.0)
    cluster.drain(limit_s=120.0)
    check_books(cluster)
    assert cluster.groups[0].counts.preemptions > 0


def test_the_same_seed_is_the_same_run_and_another_is_not() -> None:
    def run(seed: int) -> tuple[float, ...]:
        hardware, limits = llama_pair(), GroupLimits()
        cluster = Cluster(spec_of(controller=goodput(hardware, limits)), seed=seed)
        cluster.keep_busy(6, through_door=True)
        outcome = cluster.measure(0.3, 0.7)
        return (outcome.goodput, outcome.draft_load, outcome.num_events, *outcome.ttft_ms)

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_a_lone_request_takes_the_time_of_its_rounds() -> None:
    hardware = llama_pair()
    length, number = 100, 40
    for k in (0, 4):
        spec = spec_of(k=k, num_pools=1, groups_per_pool=1, workers_per_pool=1)
        cluster = Cluster(replace(spec, limits=GroupLimits(jitter=0.0)))
        request = next(iter(_requests(1)))
        request.committed_len, request.num_to_generate, request.acceptance = length, number, 1.0
        cluster.submit(request)
        cluster.drain(limit_s=10.0)
        # It reads its prompt for the first token; all drafts stand.
        overhead_s = hardware.round_overhead_s(1) + 2 * hardware.wire_s
        expected_s = hardware.verify_s(length, length) + 2 * hardware.wire_s
        done = 1
        while done < number:
            drafted = min(k, number - done - 1)
            context = length + done
            expected_s += hardware.verify_s(1 + drafted, context) + overhead_s
            if drafted:
                steps = np.ones(drafted)
                expected_s += hardware.draft_s(steps, context) + 2 * hardware.wire_s
            done += 1 + drafted
        taken_s = cluster.ledger.finished_s[request.request_id]
        assert taken_s == pytest.approx(expected_s, rel=0.01)


def _requests(number: int) -> list[SimulatedRequest]:
    source = Source(SHORT, seed=9)
    return [source.draw(0.0) for _ in range(number)]


def a_wish(name: str, num_draft_tokens: int, *, context: int = 0, num_unseen: int = 1) -> DraftWish:
    return DraftWish(
        request_id=RequestId(name),
        num_draft_tokens=num_draft_tokens,
        context_tokens=context,
        num_unseen=num_unseen,
    )


def test_a_worker_is_the_queue_of_theory() -> None:
    """Poisson arrivals of exponential reading jobs, served one at a time: M/M/1, if they are not merged."""
    events = EventQueue()
    # Nothing but computing, so that a job takes as long as it has tokens.
    placement = Placement(shape=replace(LLAMA_1B, num_parameters=1e9), step_s=0.0)
    hardware = Hardware(target=Placement(shape=LLAMA_70B, num_gpus=8), draft=placement, wire_s=0.0)
    worker = DraftWorker("one", hardware, events)
    per_token_s = 2e9 / (placement.gpu.flops * placement.gpu.flops_share)
    generator = np.random.default_rng(11)
    load, mean_tokens, number = 0.6, 4e5, 20_000
    gaps = generator.exponential(mean_tokens * per_token_s / load, number)
    tokens = np.ceil(generator.exponential(mean_tokens, number)).astype(int) + 500
    spent: list[float] = []
    backlog: list[tuple[float, int]] = []

    def serve_next() -> None:
        arrived_s, size = backlog[0]

        def done(reply: DraftReply) -> None:
            spent.append(events.now_s - arrived_s)
            backlog.pop(0)
            if backlog:
                serve_next()

        worker.submit(DraftMessage("all", [a_wish("prompt", 0, num_unseen=size)], done))

    def arrive(size: int) -> None:
        backlog.append((events.now_s, size))
        if len(backlog) == 1:
            serve_next()

    for time_s, size in zip(np.cumsum(gaps).tolist(), tokens.tolist(), strict=True):
        events.at(time_s, lambda size=size: arrive(size))  # type: ignore[misc]
    events.run(math.inf)
    assert len(spent) == number
    service_s = mean_tokens * per_token_s
    assert np.mean(spent) == pytest.approx(service_s / (1.0 - load), rel=0.08)
    assert worker.busy_s / float(gaps.sum()) == pytest.approx(load, rel=0.03)


def test_a_group_of_one_place_is_a_queue_with_one_server() -> None:
    """Plain decoding, one request at a time: every end is that of Lindley's recursion."""
    hardware = llama_pair()
    trace = replace(SHORT, prompt=Lengths(median=100, mean=101))
    limits = GroupLimits(max_num_seqs=1, jitter=0.0)
    cluster = Cluster(
        ClusterSpec(hardware=hardware, controller=fixed(0), trace=trace, limits=limits), seed=13
    )
    cluster.send_traffic([LoadStep(start_s=0.0, rate=1.4)], end_s=60.0)
    cluster.run(60.0)
    cluster.drain(limit_s=200.0)
    ledger = cluster.ledger
    free_s, num_waited = 0.0, 0
    for one in sorted(ledger.finished.values(), key=lambda one: one.arrived_s):
        num_waited += free_s > one.arrived_s
        now_s = max(one.arrived_s, free_s)
        prompt = one.committed_len - one.num_generated
        for number in range(one.num_generated):
            rows = prompt if number == 0 else 1
            now_s += hardware.verify_s(rows, prompt + number) + 2 * hardware.wire_s
            free_s = now_s + hardware.round_overhead_s(1)
            if number < one.num_generated - 1:
                now_s = free_s
        assert ledger.finished_s[one.request_id] == pytest.approx(now_s, abs=1e-6)
    assert num_waited > 20


def test_jobs_that_are_there_together_are_drafted_together() -> None:
    events = EventQueue()
    hardware = llama_pair()
    worker = DraftWorker("one", hardware, events)
    done: dict[str, float] = {}

    def message(name: str, num_unseen: int = 1) -> DraftMessage:
        def answer(reply: DraftReply) -> None:
            done[name] = events.now_s

        wishes = [a_wish(f"{name}-{index}", 4, context=100, num_unseen=num_unseen) for index in range(8)]
        return DraftMessage(name, wishes, answer)

    for name in ("first", "second", "third"):
        worker.submit(message(name))
    worker.submit(message("reads", num_unseen=2000))
    events.run(1.0)
    one_s = hardware.draft_s(np.full(4, 8.0), 100.0)
    two_s = hardware.draft_s(np.full(4, 16.0), 100.0)
    assert done["first"] == pytest.approx(one_s + hardware.wire_s)
    assert done["second"] == done["third"] == pytest.approx(one_s + two_s + hardware.wire_s)
    assert done["reads"] > done["third"], "whoever reads comes behind those that are quick"
    worker.submit(message("lost"))
    worker.die()
    worker.revive()
    events.run(2.0)
    assert "lost" not in done


@pytest.mark.parametrize("is_fair", [True, False], ids=["fair", "in order of arrival"])
def test_a_coordinator_with_much_to_draft_does_not_hold_up_another(is_fair: bool) -> None:
    """Batches are those of the engine; without turns the one that comes last would wait for all."""
    events, hardware = EventQueue(), llama_pair()
    shares = DraftShareConfig(max_batch_entries=32 if is_fair else 4096)
    worker = DraftWorker("one", hardware, events, shares)
    done: dict[str, float] = {}

    def submit(coordinator: str, number: int) -> None:
        def answer(reply: DraftReply) -> None:
            done[coordinator] = events.now_s

        wishes = [a_wish(f"{coordinator}-{index}", 4, context=4000) for index in range(number)]
        worker.submit(DraftMessage(coordinator, wishes, answer))

    submit("great", 2)
    for _ in range(10):
        submit("great", 100)
    submit("small", 4)
    events.run(10.0)
    batch_s = hardware.draft_s(np.full(4, 32.0), 4000.0)
    assert (done["small"] < 3 * batch_s) == is_fair
    assert done["great"] >= done["small"]


@pytest.mark.parametrize(
    ("max_moves", "mode", "number", "k"),
    [(4, "lockstep", 16, 4), (4, "draft_ahead", 4, 1), (0, "lockstep", 16, 4)],
)
def test_sequences_move_to_a_worker_that_comes_back(
    max_moves: int, mode: OverlapMode, number: int, k: int
) -> None:
    """By the engine's own rebalancing, also where drafts are there before they are asked for; where nothing
    may move, long requests stay with who was there.
    """
    trace = replace(SHORT, output=Lengths(median=8000, mean=8001))
    spec = spec_of(mode, k, trace=trace, num_pools=1, groups_per_pool=4, workers_per_pool=2)
    cluster = Cluster(replace(spec, placement=DraftPlacementConfig(max_moves=max_moves)), seed=6)
    cluster.keep_busy(number)
    cluster.fail([Failure(what="draft_worker", index=1, at_s=0.5, down_s=8.0)])
    cluster.run(9.0)
    num_sequences = 4 * number
    assert [worker.num_sequences for worker in cluster.workers[0]] == [num_sequences, 0]
    cluster.run(18.0)
    first, second = (worker.num_sequences for worker in cluster.workers[0])
    assert first + second == num_sequences
    num_moved = sum(group.links.num_moved for group in cluster.groups)
    if max_moves == 0:
        assert num_moved == 0
        assert second < num_sequences / 4, "only requests that came since"
    else:
        assert 3 / 8 <= second / num_sequences <= 5 / 8
        assert num_moved <= 5 / 8 * num_sequences, "no more than needed"


def test_verdicts_are_as_likely_as_they_should_be() -> None:
    requests = [
        replace(one, acceptance=0.8, num_to_generate=10_000, num_generated=0) for one in _requests(20_000)
    ]
    budgets = np.full(len(requests), 3)
    generator = np.random.default_rng(14)
    everyone = np.ones(len(requests), dtype=bool)
    its = play_round(requests, budgets, everyone, lambda one, pending: (2,) * (pending + 1), generator)
    for stand in range(4):
        expected = 0.8**stand * (0.2 if stand < 3 else 1.0)
        assert (its.accepted == stand).mean() == pytest.approx(expected, abs=0.012)
    assert its.ranks is not None
    whole, rejected = its.ranks[its.accepted == 3], its.ranks[its.accepted < 3]
    assert (whole == 0).mean() == pytest.approx(0.8, abs=0.012)
    assert (whole == 1).mean() == pytest.approx(0.2 * GUESS_RATES[0], abs=0.012)
    assert (rejected == 0).mean() == pytest.approx(GUESS_RATES[0], abs=0.012)
    nobody = play_round(requests, budgets, ~everyone, None, generator)
    assert nobody.committed.sum() == nobody.num_rows == len(requests)


def test_traffic_is_as_described() -> None:
    source = Source(CHAT, seed=15)
    drawn = [source.draw(0.0) for _ in range(20_000)]
    outputs = np.array([one.num_to_generate for one in drawn])
    assert np.median(outputs) == pytest.approx(CHAT.output.median, rel=0.03)
    assert outputs.mean() == pytest.approx(CHAT.output.mean, rel=0.03)
    assert np.mean([one.acceptance for one in drawn]) == pytest.approx(CHAT.acceptance, abs=0.01)
    assert len({one.request_id for one in drawn}) == len(drawn)
    steps = [LoadStep(start_s=0.0, rate=50.0), LoadStep(start_s=200.0, rate=0.0)]
    steps += [LoadStep(start_s=300.0, rate=200.0)]
    times = np.array(list(arrival_times(steps, 400.0, 2.0, np.random.default_rng(16))))
    assert (np.diff(times) >= 0).all()
    assert (times < 200.0).sum() == pytest.approx(10_000, rel=0.05)
    assert not ((times > 200.0) & (times < 300.0)).any()
    assert (times > 300.0).sum() == pytest.approx(20_000, rel=0.05)
    gaps = np.diff(times[times < 200.0])
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.1)


def test_rooflines_hold_what_they_should() -> None:
    target = Placement(shape=LLAMA_70B, num_gpus=8)
    read_s = LLAMA_70B.weight_bytes / (8 * 3.35e12)
    assert read_s < target.seconds(1, 0) < 1.8 * read_s, "memory-bound"
    assert target.seconds(64, 0) == target.seconds(1, 0)
    compute_s = 2 * 70.6e9 * 4096 / (8 * 989e12)
    assert compute_s < target.seconds(4096, 0) < 1.8 * compute_s, "compute-bound"
    assert 1.1e6 < target.kv_tokens < 1.5e6


def test_a_pool_that_is_too_small_costs_goodput_and_says_so_in_its_load() -> None:
    situation = Situation(mode="draft_ahead", num_draft_tokens=4, num_sequences=16)
    needed = bare_times(llama_pair(), CHAT, situation).load
    spec = spec_of("draft_ahead", trace=CHAT, num_pools=1)
    rates, loads = [], []
    for groups, workers in ((8, 1), (1, 2)):
        cluster = Cluster(replace(spec, groups_per_pool=groups, workers_per_pool=workers))
        cluster.keep_busy(16)
        outcome = cluster.measure(0.5, 2.0)
        rates.append(outcome.goodput_per_group)
        loads.append(outcome.draft_load)
    assert rates[0] < 0.7 * rates[1]
    assert loads[0] > 0.95
    assert 0.4 * needed < 2 * loads[1] < 1.6 * needed


def test_the_fewest_workers_lie_between_those_looked_at() -> None:
    assert fewest_workers([(0.25, 95.0), (1.0, 100.0)]) == 0.25
    assert fewest_workers([(0.25, 50.0), (0.5, 80.0), (1.0, 100.0)]) == pytest.approx(2**-0.5)
    assert fitted_x([1.0, 2.0, 30.0], [2.0, 4.0, 1.0]) == 0.5


def test_experiments_give_what_is_reported_and_drawn(tmp_path: Path) -> None:
    plan = Plan(
        modes=ModesPlan(drafters=("1B",), batches=(4,), seconds=0.5),
        pools=PoolPlan(
            drafters=("1B",),
            lengths=(2,),
            batches=(4,),
            traces=("code",),
            shares=((1, 2), (1, 1)),
            group_seconds=1.0,
        ),
        equal_devices=EqualDevicesPlan(
            drafters=("1B",),
            traces=("chat",),
            batches=(2,),
            groups=(1, 2),
            all_sizes=(Cell(drafter="1B", trace="chat", batch=2),),
            learning_s=0.2,
            seconds=0.2,
            group_seconds=0.4,
        ),
        scaling=ScalingPlan(groups=(2, 4), one_pool=(2, 4), batch=4, seconds=0.3, warm_up_s=0.1),
        loads=LoadPlan(batches=(4,), lengths=(2,), pools=1, seconds=0.5, learning_s=0.5, seeds=2),
        failures=FailurePlan(pools=1, period_s=2.0, rate_per_group=5.0),
        controlled_failures=FailurePlan(pools=1, period_s=2.0, rate_per_group=5.0),
    )
    results = simulate(plan, Progress(disable=True))
    headlines = headlines_of(results)
    assert list(headlines) == [
        "sim_ping_pong_vs_lockstep",
        "sim_draft_ahead_vs_lockstep",
        "sim_pool_rule_error",
        "sim_apart_vs_colocated_best",
        "sim_apart_vs_colocated_median",
        "sim_controller_vs_best_fixed",
        "sim_controller_vs_best_fixed_median",
    ]
    assert all(math.isfinite(value) and value >= 0.0 for value in headlines.values())
    pictures = draw(results, tmp_path)
    assert len(pictures) == 5
    assert all("<svg" in picture.read_text() for picture in pictures)
    assert FULL.scaling.groups[-1] * 8 > 4000

    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    written = write_tables(page, {"environment": environment(), **to_plain(results)})
    assert written != page
    assert write_tables(written, {"environment": environment(), **to_plain(results)}) == written
    assert "In 0 of 1 situations" in written or "In 1 of 1 situations" in written


def test_the_page_says_what_was_simulated() -> None:
    """Who simulates again runs benchmarks/simulate_tables.py."""
    root = Path(__file__).parents[2]
    results = json.loads((root / "benchmarks" / "results" / "simulate.json").read_text())
    page = (root / "docs" / "performance.md").read_text()
    assert write_tables(page, results) == page


def test_pictures_ask_for_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[train\]'"):
        draw({}, tmp_path)


@pytest.mark.parametrize("is_controlled", [False, True], ids=["k fixed", "k controlled"])
def test_speed_recovers_behind_failures(is_controlled: bool) -> None:
    plan = FailurePlan(pools=1, period_s=5.0, rate_per_group=5.0)
    results = endure(plan, _nothing, is_controlled=is_controlled)
    assert results["arrived"] == results["finished"]
    assert results["replayed"] > 0
    phases = results["phases"]
    assert phases["no drafters"]["token_p50_ms"] > 1.2 * phases["before"]["token_p50_ms"]
    assert phases["after"]["token_p50_ms"] < 1.25 * phases["before"]["token_p50_ms"]


def _nothing() -> None:
    """No progress to show."""


def test_cost_profiles_are_what_a_controller_can_use() -> None:
    profile = llama_pair().profile(2048, noise=0.0)
    assert profile.fault() is None
    seconds = [point.seconds for point in profile.verify if point.num_sequences == 64]
    assert seconds == sorted(seconds)
