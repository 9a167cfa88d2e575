"""Drafting on the targets' own GPUs beside draft workers, with as many GPUs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulation.cluster import Cluster, ClusterSpec, Failure
from benchmarks.simulation.colocated import OwnDrafter, with_fastest_draft
from benchmarks.simulation.equal_devices import (
    Cell,
    EqualDevicesPlan,
    apart_spec,
    cluster_of,
    compare_equal_devices,
    whole_spec,
)
from benchmarks.simulation.experiments import MODES, fixed, goodput
from benchmarks.simulation.group import GroupKind, GroupLimits
from benchmarks.simulation.hardware import LLAMA_1B, LLAMA_70B, Hardware, Placement, llama_pair
from benchmarks.simulation.traffic import Lengths, LoadStep, SimulatedRequest, Source, Trace
from specdec.core.ids import RequestId

SHORT = Trace(
    name="short",
    prompt=Lengths(median=200, mean=300),
    output=Lengths(median=30, mean=50),
    acceptance=0.7,
)


def colocated(k: int, **changes: object) -> ClusterSpec:
    spec = ClusterSpec(
        hardware=with_fastest_draft(llama_pair(), 1, 100.0),
        controller=fixed(k),
        trace=SHORT,
        workers_per_pool=0,
        kind="colocated",
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def a_request(length: int, number: int, *, acceptance: float = 1.0) -> SimulatedRequest:
    request = Source(SHORT, seed=9).draw(0.0)
    request.committed_len, request.num_to_generate, request.acceptance = length, number, acceptance
    return request


def seconds_alone(spec: ClusterSpec, request: SimulatedRequest) -> float:
    """Return what a request takes that has a cluster for itself."""
    cluster = Cluster(replace(spec, limits=GroupLimits(jitter=0.0)))
    cluster.submit(request)
    cluster.drain(limit_s=10.0)
    return cluster.ledger.finished_s[request.request_id]


def read_s(rows: float, context: float, parameters: float, kv_bytes: float, layers: int) -> float:
    """Return what a step takes on eight H100, by hand: weights or operations, the cache, launches, sums."""
    bandwidth, operations = 8 * 0.8 * 3.35e12, 8 * 0.6 * 989e12
    weights_s, computing_s = 2.0 * parameters / bandwidth, 2.0 * parameters * rows / operations
    return max(weights_s, computing_s) + context * kv_bytes / bandwidth + 0.15e-3 + 2 * layers * 10e-6


def target_s(rows: float, context: float) -> float:
    return read_s(rows, context, 70.6e9, 2 * 2 * 80 * 1024, 80)


def draft_s(rows: float, context: float) -> float:
    return read_s(rows, context, 1.24e9, 2 * 2 * 16 * 512, 16)


@pytest.mark.parametrize("k", [0, 4])
def test_a_round_takes_drafting_and_verification_and_nothing_between(k: int) -> None:
    length, number = 100, 40
    # Both models read the prompt, the drafter without its last token; that gives the first token.
    expected_s, done = draft_s(length - 1, 0) + target_s(length, length), 1
    while done < number:
        drafted = min(k, number - done - 1)
        context = length + done
        # The target has one row more than there are drafts.
        expected_s += sum(draft_s(1.0, context) for _ in range(drafted)) + target_s(1 + drafted, context)
        done += 1 + drafted
        expected_s += 0.3e-3 + 0.03e-3  # the coordinator's own
    assert seconds_alone(colocated(k), a_request(length, number)) == pytest.approx(expected_s, rel=1e-6)


def test_without_a_draft_model_nothing_reads_prompts_but_the_target() -> None:
    length, number = 100, 10
    expected_s = target_s(length, length)
    expected_s += sum(0.33e-3 + target_s(1, length + done) for done in range(1, number))
    spec = colocated(0, kind="undrafted")
    assert seconds_alone(spec, a_request(length, number)) == pytest.approx(expected_s, rel=1e-6)


def test_the_draft_model_lies_on_as_many_gpus_as_draft_fastest() -> None:
    hardware = with_fastest_draft(llama_pair(), 16, 1000.0)
    assert hardware.draft.num_gpus == 8
    # Where adding up takes longer than reading, it is one.
    slow = replace(llama_pair(), draft=Placement(shape=LLAMA_1B, allreduce_s=1e-3))
    assert with_fastest_draft(slow, 16, 1000.0).draft.num_gpus == 1


def test_the_draft_model_takes_memory_from_the_target() -> None:
    target = Placement(shape=LLAMA_70B, num_gpus=8)
    alone = Hardware(target=target, draft=Placement(shape=LLAMA_1B)).target.kv_tokens
    everywhere = Hardware(target=target, draft=Placement(shape=LLAMA_1B, num_gpus=8)).kv_tokens_beside_draft
    on_one = Hardware(target=target, draft=Placement(shape=LLAMA_1B)).kv_tokens_beside_draft
    assert on_one < 0.6 * alone < everywhere < alone
    (group,) = Cluster(colocated(4)).groups
    assert group._num_blocks == everywhere // group.limits.block_size


def test_what_was_not_read_while_nothing_was_drafted_is_read_before_the_next_draft() -> None:
    hardware = colocated(4).hardware
    drafter = OwnDrafter(hardware, max_read_tokens=50)
    request = a_request(101, 100)
    nothing = np.zeros(0, dtype=np.int64)
    # Three rounds for the prompt, whose last token waits for a draft.
    tokens = (50, 50, 0)
    seconds = [drafter.propose([], nothing, [request]).seconds for _ in tokens]
    assert seconds == pytest.approx([draft_s(50, 0), draft_s(50, 0), 0.0])
    budgets = np.array([4])
    drafts = drafter.propose([request], budgets, [])
    assert drafts.is_drafted.all()
    assert drafts.num_behind == 0
    assert drafts.seconds == pytest.approx(4 * draft_s(1, 101))
    # Of 34 tokens that came since, it has drafted behind the four of the first round.
    request.committed_len += 34
    drafts = drafter.propose([request], budgets, [])
    assert drafts.num_behind == 29
    assert drafts.seconds == pytest.approx(draft_s(2 + 29, 135) + 3 * draft_s(1, 135))
    request.committed_len += 100
    drafts = drafter.propose([request], budgets, [])
    assert not drafts.is_drafted.any(), "too much for one call"
    assert drafts.seconds == pytest.approx(draft_s(50, 0))
    drafter.release(request.request_id)
    assert not drafter.known


def test_who_has_least_to_read_is_drafted_for_first() -> None:
    drafter = OwnDrafter(colocated(4).hardware, max_read_tokens=50)
    behind, level = (replace(a_request(200, 100), request_id=RequestId(name)) for name in ("behind", "level"))
    drafter.assume_read(level)
    drafts = drafter.propose([behind, level], np.array([4, 4]), [])
    assert drafts.is_drafted.tolist() == [False, True]
    assert drafts.num_behind == 199


@pytest.mark.parametrize(
    ("kind", "is_controlled"), [("undrafted", False), ("colocated", False), ("colocated", True)]
)
def test_every_request_ends_once_also_where_groups_die(kind: GroupKind, is_controlled: bool) -> None:
    spec = colocated(4 if kind == "colocated" else 0, kind=kind, groups_per_pool=3)
    if is_controlled:
        controller = goodput(spec.hardware.in_one_process(), spec.limits, ("lockstep",))
        spec = replace(spec, controller=controller)
    cluster = Cluster(spec, seed=2)
    cluster.send_traffic([LoadStep(start_s=0.0, rate=40.0)], end_s=5.0)
    cluster.fail([Failure(what="target_group", index=1, at_s=2.0, down_s=1.0)])
    cluster.run(5.0)
    cluster.drain(limit_s=60.0)
    ledger = cluster.ledger
    assert len(ledger.finished) == ledger.num_arrived > 100
    assert ledger.num_replays > 0
    finished = ledger.finished.values()
    assert all(one.num_generated == one.num_to_generate for one in finished)
    assert sum(ledger.tokens_by_second) == sum(one.num_to_generate for one in finished)
    for group in cluster.groups:
        assert group.load == 0
        group.check_integrity()
        assert group.own_drafter is None or not group.own_drafter.known
    assert (sum(group.counts.accepted for group in cluster.groups) > 0) == (kind == "colocated")


def test_only_groups_whose_drafters_are_apart_have_draft_workers() -> None:
    with pytest.raises(ValueError, match="workers_per_pool must be 0 for colocated groups, got 1"):
        colocated(4, workers_per_pool=1)


@pytest.mark.parametrize(("num_groups", "width"), [*itertools.product((1, 4, 6, 32), (1, 2, 8))])
def test_clusters_that_are_compared_have_as_many_gpus_and_the_same_requests(
    num_groups: int, width: int
) -> None:
    cell = Cell(drafter="1B", trace="chat", batch=5)
    whole = whole_spec(cell, num_groups + 1)
    assert whole.num_gpus == whole.num_groups * 8
    begun = set()
    for mode in MODES:
        apart = apart_spec(cell, mode, num_groups, width)
        assert apart.num_groups == num_groups
        assert apart.num_pools * apart.workers_per_pool * width == 8, "every GPU of the last group drafts"
        assert apart.num_gpus == whole.num_gpus
        for spec in (whole, apart):
            cluster = cluster_of(cell, spec)
            begun.add(frozenset(name for group in cluster.groups for name in group.running))
            loads = [group.load for group in cluster.groups]
            assert sum(loads) == 5 * (num_groups + 1)
            assert max(loads) - min(loads) <= 1
    assert len(begun) == 1


def test_the_rule_chooses_among_numbers_of_groups_that_draft_workers_have_memory_for() -> None:
    plan = EqualDevicesPlan(drafters=("3B",), traces=("long",), batches=(64,))
    (large,) = plan.cells
    small = replace(large, batch=4)
    for x in (0.1, 0.87, 100.0):
        assert plan.groups_by_rule(large, "lockstep", x) in (4, 8)
    assert plan.groups_by_rule(small, "lockstep", 100.0) == 32
    assert plan.groups_by_rule(small, "lockstep", 0.01) == 4
    assert replace(plan, all_sizes=(small,)).sizes(small, 0.87) == list(itertools.product(MODES, plan.groups))


def test_rows_tell_every_cluster_beside_as_many_gpus() -> None:
    cell = Cell(drafter="3B", trace="chat", batch=3)
    plan = EqualDevicesPlan(
        drafters=("3B",),
        traces=("chat",),
        batches=(3,),
        groups=(1, 2),
        all_sizes=(cell,),
        learning_s=0.2,
        seconds=0.2,
        group_seconds=0.4,
    )
    ticks: list[None] = []
    (row,) = compare_equal_devices(plan, 0.87, lambda: ticks.append(None))
    assert len(ticks) == plan.num_runs(0.87) == 17
    assert {(one["mode"], one["groups"], one["width"]) for one in row["apart"]} == set(
        itertools.product(MODES, (1, 2), (1, 8))
    )
    for one in row["apart"]:
        beside = row["colocated"][one["groups"]]
        assert one["outcome"].num_gpus == beside.num_gpus == 8 * (one["groups"] + 1)
        assert one["vs_colocated"] == one["outcome"].goodput / beside.goodput
    assert {one["mode"] for one in row["apart"] if one["is_by_rule"]} == set(MODES)
    assert row["colocated_on_one"].num_gpus == row["colocated"][1].num_gpus
    assert row["on_one_vs_colocated"] < 1.0, "one GPU reads a draft model of 3B for longer than eight"
    assert row["colocated_vs_plain"] > 1.0, "three requests wait for memory, which drafts do not cost much of"
