"""Where sequences are drafted for: placement and rebalancing as pure decisions."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.draft_pool.patience import DraftDeadlineConfig
from specdec.engine.draft_pool.placement import (
    DraftPlacementConfig,
    DraftWorkerView,
    MemoryShortage,
    Vacancy,
    place,
    rebalance,
)
from specdec.transport.base import PeerId

CONFIG = DraftPlacementConfig(max_moves=3, imbalance=0.25)


def view(name: str, num_own: int, num_others: int = 0, **fields: object) -> DraftWorkerView:
    return DraftWorkerView(worker=PeerId(name), num_own=num_own, num_others=num_others, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "chosen"),
    [
        ([], None),
        ([view("a", 2), view("b", 1)], "b"),
        ([view("a", 2, capacity=64), view("b", 1, 9, capacity=64)], "a"),
        ([view("a", 2, capacity=4), view("b", 4, capacity=64)], "b"),
        ([view("a", 0, is_ready=False), view("b", 5)], "b"),
        ([view("a", 0, is_ready=False), view("b", 5, is_ready=False)], "a"),
        ([view("a", 0, has_place=False), view("b", 5)], "b"),
        ([view("a", 0, has_place=False), view("b", 5, is_ready=False)], "b"),
        ([view("a", 0, has_place=False)], None),
        ([view("a", 3, capacity=8), view("b", 2)], "b"),
        ([view("a", 3, 20, capacity=64), view("b", 0, 24, capacity=64)], "b"),
        ([view("a", 3, 10, capacity=64), view("b", 0, 24, capacity=64)], "a"),
    ],
    ids=[
        "nobody",
        "own",
        "those of others count",
        "small ones fill up",
        "late ones come last",
        "all are late",
        "full ones are left out",
        "a late place is better than none",
        "all are full",
        "who has not told is like the others",
        "of those about equally busy the one with the fewest own",
        "but not of those that are busier",
    ],
)
def test_a_sequence_goes_to_the_least_busy(workers: list[DraftWorkerView], chosen: str | None) -> None:
    assert place(workers, CONFIG) == chosen


def apply(workers: dict[PeerId, DraftWorkerView], moves: list[tuple[PeerId, PeerId, int]]) -> int:
    num = 0
    for source, destination, count in moves:
        assert count > 0
        assert workers[source].num_own >= count, "only what is there can be moved"
        workers[source] = workers[source].with_more(-count)
        workers[destination] = workers[destination].with_more(count)
        num += count
    return num


POOLS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(8, 64), st.booleans(), st.booleans()),
    min_size=1,
    max_size=6,
)


def pool(facts: list[tuple[int, int, int, bool, bool]]) -> dict[PeerId, DraftWorkerView]:
    views = [
        view(f"w{index}", own, others, capacity=capacity, is_ready=is_ready, has_place=has_place)
        for index, (own, others, capacity, is_ready, has_place) in enumerate(facts)
    ]
    return {one.worker: one for one in views}


@given(POOLS, st.floats(0, 1, exclude_max=True))
def test_a_few_move_from_busy_to_less_busy_workers(
    facts: list[tuple[int, int, int, bool, bool]], draw: float
) -> None:
    workers = pool(facts)
    moves = rebalance(list(workers.values()), CONFIG, draw)
    for source, destination, _ in moves:
        assert workers[source].is_ready, "nobody flees from a late one here: that is a matter of patience"
        assert workers[destination].is_ready
        assert workers[destination].has_place
        assert workers[source].load > 1.25 * workers[destination].with_more(1).load
    assert apply(workers, moves) <= 3


@given(POOLS)
def test_one_coordinator_comes_to_rest_and_stays_there(
    facts: list[tuple[int, int, int, bool, bool]],
) -> None:
    workers = pool([(own, 0, capacity, True, True) for own, _, capacity, _, _ in facts])
    num_before = sum(one.num_own for one in workers.values())
    num_moved, num_rounds = 0, 0
    while moved := apply(workers, rebalance(list(workers.values()), CONFIG, 0.0)):
        num_moved += moved
        num_rounds += 1
        assert num_rounds <= num_before, "each round brings it nearer"
    assert num_moved <= num_before, "no sequence moves back and forth"
    assert not rebalance(list(workers.values()), CONFIG, 0.999), "at rest whatever chance says"
    for one in workers.values():
        for other in workers.values():
            assert one.num_own == 0 or one.load <= 1.25 * other.with_more(1).load + 1e-9


@pytest.mark.parametrize("num_coordinators", [2, 10, 40])
def test_many_coordinators_do_not_swing(num_coordinators: int) -> None:
    """A worker joins: everybody sees an empty one at the same time, and hears of the others too late."""
    rng = random.Random(num_coordinators)
    held = [[rng.randint(4, 8), rng.randint(4, 8), 0] for _ in range(num_coordinators)]
    total = sum(map(sum, held))
    num_moved = 0
    for _ in range(200):
        sums = [sum(one[worker] for one in held) for worker in range(3)]
        before = num_moved
        for one in held:
            workers = {
                PeerId(str(index)): view(str(index), one[index], sums[index] - one[index], capacity=500)
                for index in range(3)
            }
            num_moved += apply(workers, rebalance(list(workers.values()), CONFIG, rng.random()))
            one[:] = [workers[PeerId(str(index))].num_own for index in range(3)]
        if num_moved == before:
            break
    sums = [sum(one[worker] for one in held) for worker in range(3)]
    assert max(sums) <= 1.3 * (min(sums) + 1), sums
    assert num_moved < 0.6 * total, "a third of them has to move; not many more may"


def test_that_swing_would_be_seen() -> None:
    """Negative control: if everybody did all that is needed, the herd would run back and forth."""
    held = [[6, 6, 0] for _ in range(10)]
    unlimited = DraftPlacementConfig(max_moves=100)
    num_moved = 0
    for _ in range(20):
        sums = [sum(one[worker] for one in held) for worker in range(3)]
        as_if_alone = [view(str(index), num, capacity=50) for index, num in enumerate(sums)]
        for one in held:
            for source, destination, num in rebalance(as_if_alone, unlimited, 0.0):
                count = min(num, one[int(source)])
                one[int(source)] -= count
                one[int(destination)] += count
                num_moved += count
    assert num_moved > 0.6 * 120


@pytest.mark.parametrize("num_others", [100_000, 1 << 60])
def test_however_many_there_are_a_thought_is_short(num_others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round waits for it; what workers say of others is taken as it is."""
    num_looks = 0

    def counted(one: DraftWorkerView, number: int) -> DraftWorkerView:
        nonlocal num_looks
        num_looks += 1
        return replace(one, num_own=one.num_own + number)

    monkeypatch.setattr(DraftWorkerView, "with_more", counted)
    busy, idle = view("a", 40, num_others, capacity=256), view("b", 0, capacity=256)
    rebalance([busy, idle], CONFIG, 0.5)
    assert num_looks < 8_000


def test_of_large_pools_workers_come_to_hold_about_the_same() -> None:
    """Several at a time are thought about there; as many move as would one by one."""
    workers = {one.worker: one for one in (view("a", 4000, capacity=4096), view("b", 0, capacity=4096))}
    all_at_once = DraftPlacementConfig(max_moves=4096)
    assert apply(workers, rebalance(list(workers.values()), all_at_once, 0.0)) > 0
    loads = sorted(one.load for one in workers.values())
    assert loads[1] <= 1.27 * loads[0]
    assert loads[1] >= 1.15 * loads[0], "no more than has to"


def test_moving_can_be_switched_off() -> None:
    assert not rebalance([view("a", 40), view("b", 0)], DraftPlacementConfig(max_moves=0), 0.9)


def test_nothing_is_moved_to_a_worker_that_is_short_of_memory() -> None:
    busy, idle = view("a", 40), view("b", 0)
    assert rebalance([busy, idle], CONFIG, 0.0)
    assert not rebalance([busy, replace(idle, is_short_of_memory=True)], CONFIG, 0.0)


def test_what_there_was_no_memory_for_is_tried_ever_more_rarely_and_one_at_a_time() -> None:
    memory = MemoryShortage(DraftDeadlineConfig(first_retry_s=0.1, max_retry_s=1.0))
    assert memory.may_try(1 << 20, 0.0)
    for num_tokens in (70, 50, 60):
        memory.refused(num_tokens, 0.0)
    attempts, now_s = [], 0.0
    while len(attempts) < 6:
        now_s += 0.01
        assert memory.may_try(49, now_s), "who is shorter is not kept from it"
        if memory.may_try(50, now_s):
            attempts.append(now_s)
            memory.placed(50, now_s)
            assert not memory.may_try(50, now_s), "one at a time"
            memory.refused(50, now_s)
    intervals = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert attempts[0] == pytest.approx(0.1, abs=0.02)
    assert intervals == pytest.approx([0.2, 0.4, 0.8, 1.0, 1.0], abs=0.02)


def test_one_that_there_was_memory_for_is_followed_by_the_next_one() -> None:
    memory = MemoryShortage(DraftDeadlineConfig(first_retry_s=0.1, max_retry_s=1.0))
    memory.refused(50, 0.0)
    memory.accepted(40, 0.0)
    assert not memory.may_try(50, 0.0), "that says nothing of longer ones"
    for now_s in (0.1, 0.12, 0.14):
        assert memory.may_try(50, now_s)
        memory.placed(50, now_s)
        assert not memory.may_try(50, now_s)
        memory.accepted(50, now_s)
    memory.placed(50, 2.0)
    memory.accepted(50, 2.0)
    assert not memory.is_doubtful(50), "nobody was refused for long"


def test_attempts_that_there_was_memory_for_were_not_in_vain() -> None:
    memory = MemoryShortage(DraftDeadlineConfig(first_retry_s=0.1, max_retry_s=2.0))
    memory.refused(50, 0.0)
    for _ in range(8):
        memory.placed(50, 0.1)
        memory.accepted(50, 0.1)
    memory.placed(50, 0.1)
    memory.refused(50, 0.1)
    assert not memory.may_try(50, 0.1 + 0.15)
    assert memory.may_try(50, 0.1 + 0.25), "one was in vain"


def test_the_next_attempt_is_some_time_behind_the_last_refusal() -> None:
    """However late that is, and also where what had found memory is crowded out."""
    memory = MemoryShortage(DraftDeadlineConfig(first_retry_s=0.1, max_retry_s=2.0))
    memory.refused(50, 0.0)
    memory.placed(50, 0.1)
    memory.refused(50, 0.9)
    assert not memory.may_try(50, 0.9 + 0.15)
    memory.placed(50, 1.2)
    memory.accepted(50, 1.2)
    memory.refused(52, 1.3)
    assert not memory.may_try(50, 1.3 + 0.05)
    assert memory.may_try(50, 1.3 + 0.15)


def test_those_that_outgrow_it_keep_no_shorter_one_from_being_tried() -> None:
    """What they had there is free: however often that happens, the next attempt comes."""
    config = DraftDeadlineConfig(first_retry_s=0.1, max_retry_s=2.0)
    memory = MemoryShortage(config)
    memory.refused(45, 0.0)
    now_s = 0.0
    for _ in range(5):
        while not memory.may_try(45, now_s):
            now_s += 0.05
        memory.placed(45, now_s)
        memory.refused(45, now_s)
    tried_at_s = now_s + config.max_retry_s
    while now_s < tried_at_s:
        now_s += 0.5
        memory.refused(2000, now_s, had_it=True)
    assert memory.may_try(45, now_s + 0.15)


def test_memory_that_was_freed_is_tried_at_once_and_by_one() -> None:
    memory = MemoryShortage(DraftDeadlineConfig(first_retry_s=0.1, max_retry_s=2.0))
    memory.refused(50, 0.0)
    memory.placed(50, 0.1)
    assert not memory.may_try(50, 0.15)
    memory.freed()
    assert memory.may_try(50, 0.15)
    memory.placed(50, 0.15)
    memory.refused(50, 0.15)
    assert not memory.may_try(50, 0.15 + 0.35), "attempts in vain still count"


def test_what_was_refused_long_ago_says_nothing_of_now() -> None:
    memory = MemoryShortage(DraftDeadlineConfig(first_retry_s=0.1, max_retry_s=1.0))
    memory.refused(50, 0.0)
    assert memory.is_recent(1.9)
    assert not memory.is_recent(2.1)
    memory.refused(80, 2.1)
    assert memory.is_recent(2.2)
    assert not memory.is_doubtful(79)


def test_a_full_worker_is_tried_ever_more_rarely_and_with_one_sequence_at_a_time() -> None:
    vacancy = Vacancy(DraftDeadlineConfig(first_retry_s=0.1, max_retry_s=1.0))
    assert vacancy.has_place(0.0)
    vacancy.placed(0.0)
    assert vacancy.has_place(0.0), "an open one takes any number"
    attempts, now_s = [], 0.0
    vacancy.refused(now_s)
    while len(attempts) < 6:
        now_s += 0.01
        if vacancy.has_place(now_s):
            attempts.append(now_s)
            vacancy.placed(now_s)
            assert not vacancy.has_place(now_s), "one at a time"
            vacancy.refused(now_s)
    intervals = [later - earlier for earlier, later in itertools.pairwise(attempts)]
    assert intervals == pytest.approx([0.4, 0.8, 1.0, 1.0, 1.0], abs=0.02)
    for _ in range(10):
        vacancy.accepted()
    assert vacancy.has_place(now_s)
    vacancy.told(2)
    for _ in range(2):
        assert vacancy.has_place(now_s)
        vacancy.placed(now_s)
    assert not vacancy.has_place(now_s), "it said how many"
    assert vacancy.has_place(now_s + 0.11)
