"""Whichever door is asked, numbers are those of all, and counters never fall."""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass

import pytest

from cluster.directory import Member
from cluster.shared_metrics import SharedMetrics, is_sound, sound_part
from specdec.transport.base import PeerAddress, PeerId
from specdec.transport.messages import DoorReport, DoorTotals
from tests.cluster.door_series import OPEN, REQUESTS

OF_GROUPS = {"rounds": 10.0, "num_requests_running": 3.0, 'target_group_rounds{target_group="g"}': 10.0}


def member(name: str, since: float, generation: str = "") -> Member:
    address = PeerAddress(peer_id=PeerId(name), endpoint="", public_key="")
    return Member(address=address, role="ingress", since=since, generation=generation)


def report(requests: float, is_open: float = 1.0) -> DoorReport:
    return DoorReport({REQUESTS: requests}, {OPEN: is_open})


def sums(of: SharedMetrics, own: DoorReport, *, is_complete: bool = True, **more: float) -> DoorTotals:
    totals = of.add_up(own, {**OF_GROUPS, **more}, is_complete=is_complete)
    assert totals is not None
    return totals


def door(name: str, since: float, *others: Member) -> SharedMetrics:
    shared = SharedMetrics(PeerId(name), since)
    shared.set_doors([member(name, since), *others])
    return shared


def test_the_oldest_door_keeps_the_account_whatever_order_it_hears_of() -> None:
    old, young = member("b", 5.0), member("a", 6.0)
    assert door("b", 5.0, young).keeps
    assert door("a", 6.0, old).keeper == "b"
    assert door("c", 5.0, old, young).keeper == "b"
    alone = SharedMetrics(PeerId("c"), 9.0)
    assert alone.keeps


OLD, NEW = "of before", "of the update"


@pytest.mark.parametrize(
    ("with_groups", "keeper"), [((OLD,), "a"), ((OLD, NEW), "c"), ((NEW,), "c"), ((), "c")], ids=str
)
def test_of_two_generations_the_new_one_has_it_once_its_groups_are_there(
    with_groups: Collection[str], keeper: str
) -> None:
    doors = [member("a", 1.0, OLD), member("b", 2.0, OLD), member("c", 3.0, NEW), member("d", 4.0, NEW)]
    for one in doors:
        shared = SharedMetrics(one.peer_id, one.since, one.generation)
        shared.set_doors(doors, with_groups)
        assert shared.keeper == keeper


def test_an_update_does_not_begin_the_account_anew() -> None:
    """Whichever door is asked, of whichever generation: what had happened before would have happened now."""
    old, new = member("a", 1.0, OLD), member("b", 9.0, NEW)
    former = SharedMetrics(old.peer_id, old.since, OLD)
    former.set_doors([old], {OLD})
    sums(former, report(100), rounds=70.0)
    heir = SharedMetrics(new.peer_id, new.since, NEW)
    for with_groups in ({OLD}, {OLD, NEW}):
        for one in (former, heir):
            one.set_doors([old, new], with_groups)
        keeper, other = (former, heir) if former.keeps else (heir, former)
        own = {former: report(100), heir: report(3)}
        keeper.hear(PeerId("a" if other is former else "b"), other.report(own[other]))
        totals = sums(keeper, own[keeper], rounds=70.0 if keeper is former else 0.0)
        other.hear(PeerId("a" if keeper is former else "b"), totals)
        assert (totals.counters["rounds"], totals.counters[REQUESTS]) == (70, 103)
    assert heir.keeps
    heir.hear(PeerId("a"), former.report(report(104)))
    later = sums(heir, report(5), rounds=2.0)
    assert (later.counters["rounds"], later.counters[REQUESTS]) == (72, 109)
    assert later.gauges[OPEN] == 2, "of both"
    heir.set_doors([new], {NEW})
    alone = sums(heir, report(6), rounds=3.0)
    assert (alone.counters["rounds"], alone.counters[REQUESTS], alone.gauges[OPEN]) == (73, 110, 1)


def test_doors_are_added_up_and_the_keeper_tells_the_others() -> None:
    keeper, other = door("a", 1.0, member("b", 2.0)), door("b", 2.0, member("a", 1.0))
    assert keeper.listeners == ()
    keeper.hear(PeerId("b"), report(5))
    assert keeper.listeners == ("b",)
    totals = sums(keeper, report(3))
    assert totals.counters == {"rounds": 10, 'target_group_rounds{target_group="g"}': 10, REQUESTS: 8}
    assert totals.gauges == {"num_requests_running": 3, OPEN: 2}
    assert other.told is None
    other.hear(PeerId("a"), totals)
    assert other.told == totals


def test_only_the_keeper_is_believed() -> None:
    other = door("b", 2.0, member("a", 1.0), member("c", 3.0))
    other.hear(PeerId("c"), DoorTotals({REQUESTS: 5.0}, {}))
    assert other.told is None


@pytest.mark.parametrize(
    ("message", "sound"),
    [
        (report(3), True),
        (DoorReport({REQUESTS: 0.0}, {OPEN: -1.0}, {REQUESTS: 2.0}), True),
        (DoorTotals({}, {}), True),
        (DoorReport({REQUESTS: -1.0}, {}), False),
        (DoorReport({REQUESTS: math.nan}, {}), False),
        (DoorReport({}, {OPEN: math.inf}), False),
        (DoorReport({}, {}, {REQUESTS: math.inf}), False),
        (DoorTotals({"": 1.0}, {}), False),
        (DoorTotals({}, {'open{status="200"': 1.0}), False),
        (DoorTotals({"two words": 1.0}, {}), False),
    ],
)
def test_what_is_told_has_to_be_numbers_of_series(message: DoorReport | DoorTotals, sound: bool) -> None:
    assert is_sound(message) == sound


def test_of_what_a_target_group_tells_only_numbers_of_series_are_added_up() -> None:
    told = {**OF_GROUPS, "queue_wait_seconds": math.inf, "a b": 1.0, "kv_cache_usage_perc": math.nan}
    assert sound_part(told) == OF_GROUPS
    assert sound_part({"below": -1.0}) == {"below": -1.0}, "a gauge may be"


def test_a_door_that_is_gone_leaves_what_it_had_counted_and_nothing_open() -> None:
    keeper = door("a", 1.0, member("b", 2.0))
    keeper.hear(PeerId("b"), report(5))
    keeper.set_doors([member("a", 1.0)])
    totals = sums(keeper, report(3))
    assert (totals.counters[REQUESTS], totals.gauges[OPEN]) == (8, 1)


def test_doors_that_come_and_go_for_ever_leave_a_sum_and_are_not_kept_apart() -> None:
    keeper = door("a", 1.0)
    for number in range(200):
        name = f"door-{number}"
        keeper.set_doors([member("a", 1.0), member(name, 2.0 + number)])
        keeper.hear(PeerId(name), report(1))
        assert sums(keeper, report(3)).counters[REQUESTS] == 3 + number + 1
    keeper.set_doors([member("a", 1.0)])
    totals = sums(keeper, report(3))
    assert (totals.counters[REQUESTS], totals.gauges[OPEN]) == (203, 1)
    assert len(keeper._reports) < 40


def test_the_next_keeper_counts_on_once_all_have_reported() -> None:
    b, c = member("b", 2.0), member("c", 3.0)
    heir = door("b", 2.0, member("a", 1.0), c)
    gone = 'target_group_rounds{target_group="gone"}'
    told = {REQUESTS: 100.0, "rounds": 70.0, gone: 60.0, 'requests_refused{reason="late"}': 4.0}
    heir.hear(PeerId("a"), DoorTotals(told, {OPEN: 9.0}))
    heir.set_doors([b, c])
    assert heir.keeps
    assert sums(heir, report(20)).counters == told, "c has not reported"
    heir.hear(PeerId("c"), report(30))
    assert sums(heir, report(21), is_complete=False).counters == told, "a group has not told"
    totals = sums(heir, report(22))
    assert totals.counters[REQUESTS] == 100
    assert totals.counters["rounds"] == 70
    assert totals.counters['requests_refused{reason="late"}'] == 4
    assert gone not in totals.counters
    assert totals.gauges[OPEN] == 2
    later = sums(heir, report(25), is_complete=False, rounds=11.0)
    assert (later.counters[REQUESTS], later.counters["rounds"]) == (103, 71)


def test_what_the_keeper_before_has_said_to_one_alone_counts() -> None:
    a, b, c = member("a", 1.0), member("b", 2.0), member("c", 3.0)
    heir, third = door("b", 2.0, a, c), door("c", 3.0, a, b)
    heir.hear(PeerId("a"), DoorTotals({REQUESTS: 100.0}, {}))
    third.hear(PeerId("a"), DoorTotals({REQUESTS: 104.0}, {}))
    assert third.report(report(1)).told == {}
    for one in (heir, third):
        one.set_doors([b, c])
    heir.hear(PeerId("c"), third.report(report(30)))
    totals = sums(heir, report(20))
    assert totals.counters[REQUESTS] == 104
    third.hear(PeerId("b"), totals)
    assert third.report(report(31)).told == {}


def test_a_keeper_who_knows_nothing_hears_it_from_another() -> None:
    b, c = member("b", 2.0), member("c", 3.0)
    heir = door("b", 2.0, member("a", 1.0), c)
    heir.set_doors([b, c])
    assert heir.add_up(report(1), OF_GROUPS, is_complete=True) is None
    assert heir.num_taken_over == 0
    heir.hear(PeerId("c"), DoorReport({REQUESTS: 30.0}, {}, {REQUESTS: 104.0}))
    assert sums(heir, report(1)).counters[REQUESTS] == 104
    assert heir.num_taken_over == 1
    assert sums(heir, report(2)).counters[REQUESTS] == 105
    assert heir.num_taken_over == 1


def test_a_new_door_whose_clock_is_behind_takes_the_account_with_what_is_in_it() -> None:
    """It finds another there, who has kept it."""
    late = door("b", 1.0, member("a", 5.0))
    assert late.keeps
    assert late.add_up(report(1), OF_GROUPS, is_complete=True) is None, "it has not heard yet"
    late.hear(PeerId("a"), DoorReport({REQUESTS: 30.0}, {}, {REQUESTS: 100.0, "rounds": 70.0}))
    counters = sums(late, report(2)).counters
    assert (counters[REQUESTS], counters["rounds"]) == (100, 70)
    late.hear(PeerId("a"), report(33))
    assert sums(late, report(2)).counters[REQUESTS] == 103


def test_the_first_door_waits_for_nobody() -> None:
    assert sums(door("a", 1.0), report(3), is_complete=False).counters[REQUESTS] == 3


def test_in_another_order_a_sum_does_not_fall_by_its_last_bit() -> None:
    """For Prometheus all of it would have happened anew."""
    more, less = (0.1 + 0.2) + 0.3, 0.1 + (0.2 + 0.3)
    assert less < more
    keeper = door("a", 1.0)
    assert sums(keeper, report(1), rounds=more).counters["rounds"] == more
    assert sums(keeper, report(1), rounds=less).counters["rounds"] == more


def test_nor_does_it_when_the_account_changes_hands() -> None:
    rng = random.Random(2)
    for _ in range(200):
        heir = door("b", 2.0, member("a", 1.0))
        told = {"rounds": rng.random() * 100}
        heir.hear(PeerId("a"), DoorTotals(told, {}))
        heir.set_doors([member("b", 2.0)])
        assert sums(heir, report(1), rounds=rng.random()).counters["rounds"] >= told["rounds"]


def test_nobody_is_waited_for_without_end() -> None:
    heir = door("b", 2.0, member("a", 1.0), member("c", 3.0))
    heir.hear(PeerId("a"), DoorTotals({REQUESTS: 100.0}, {}))
    heir.set_doors([member("c", 3.0)])
    counted = [sums(heir, report(20 + n)).counters[REQUESTS] for n in range(8)]
    assert counted[0] == 100
    assert counted == sorted(counted)
    assert counted[-1] > 100


def test_who_asks_again_and_again_does_not_end_the_waiting() -> None:
    """What others have counted would be taken for that of who is gone, and counted twice once they tell."""
    b, c = member("b", 2.0), member("c", 3.0)
    heir = door("b", 2.0, member("a", 1.0), c)
    heir.hear(PeerId("a"), DoorTotals({REQUESTS: 700.0}, {}))
    heir.set_doors([b, c])
    for _ in range(20):
        assert heir.is_waiting
        asked = heir.add_up(report(200), OF_GROUPS, is_complete=True, is_regular=False)
        assert asked is not None
        assert asked.counters[REQUESTS] == 700
    heir.hear(PeerId("c"), DoorReport({REQUESTS: 400.0}, {}, {REQUESTS: 700.0}))
    assert sums(heir, report(200)).counters[REQUESTS] == 700
    assert not heir.is_waiting


@dataclass
class Peer:
    """A door of the simulation."""

    member: Member
    shared: SharedMetrics
    counted: float = 0.0


@pytest.mark.parametrize("clock_error_s", [0, 50])
@pytest.mark.parametrize("num_steps", [1000, 60], ids=["no update", "updates"])
def test_counters_never_fall_whoever_is_asked_and_whoever_goes(clock_error_s: int, num_steps: int) -> None:
    """`num_steps`: of each generation."""
    num_keepers_lost = 0
    for seed in range(20):
        rng = random.Random(seed)
        peers: list[Peer] = []
        told_last, all_counted = 0.0, 0.0
        for step in range(300):
            generation = str(step // num_steps)
            if not peers or (rng.random() < 0.05 and len(peers) < 4):
                one = member(f"door-{rng.random()}", step - clock_error_s * rng.random(), generation)
                peers.append(Peer(one, SharedMetrics(one.peer_id, one.since, generation)))
            members = [peer.member for peer in peers]
            with_groups = {generation, str((step - 20) // num_steps)}
            for peer in peers:
                peer.shared.set_doors(members, with_groups)
                new = rng.randrange(3)
                peer.counted += new
                all_counted += new
            (keeper,) = (peer for peer in peers if peer.shared.keeps)
            for peer in peers:
                if peer is not keeper:
                    keeper.shared.hear(peer.member.peer_id, peer.shared.report(report(peer.counted)))
            totals = keeper.shared.add_up(report(keeper.counted), {}, is_complete=True)
            assert totals is not None
            dying = rng.choice(peers) if rng.random() < 0.05 and len(peers) > 1 else None
            heard = rng.choice(peers)  # one at least, or nobody is left who knows
            while heard is keeper and len(peers) > 1:
                heard = rng.choice(peers)
            for peer in peers:
                is_told = dying is not keeper or peer is heard or rng.random() < 0.5
                if peer is not keeper and is_told:
                    peer.shared.hear(keeper.member.peer_id, totals)
            if dying is not None:
                num_keepers_lost += dying is keeper
                peers.remove(dying)
                continue
            asked = rng.choice(peers).shared.told
            assert asked is not None
            assert asked.counters[REQUESTS] >= told_last, (seed, step)
            told_last = asked.counters[REQUESTS]
        # What the others counted while the account changed hands makes up for what the keeper had.
        assert 0.8 * all_counted < told_last <= all_counted, seed
    assert num_keepers_lost > 20
