"""The scaling policies under a clock that the test moves, up to what Ray Serve hands them."""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from ray.serve.config import AutoscalingConfig

from cluster.autoscaling.config import DraftScalingConfig, TargetScalingConfig
from cluster.autoscaling.draft_demand import DraftDemand, demand_of, pool_stats
from cluster.autoscaling.draft_pool import PoolLoad, gain_of_one_more, loss_of_one_less, wanted_workers
from cluster.autoscaling.pace import Fleet, ScalingMemory, Wish, decide
from cluster.autoscaling.serve_policy import (
    DraftPoolPolicy,
    TargetGroupPolicy,
    autoscaling_options,
    group_stats,
    pool_load,
)
from cluster.autoscaling.target_groups import GroupLoad, wanted_groups, with_loads
from cluster.config import ClusterConfig, DraftPoolConfig, TargetGroupsConfig
from specdec.transport.status import RecentStatus
from tests.cluster.autoscaling.serve_context import context, told_s

TARGETS = TargetScalingConfig(min_groups=1, max_groups=8, target_itl_ms=100.0)
DRAFTS = DraftScalingConfig(min_workers=1, max_workers=8)
SEQS = 10


def groups(*loads: GroupLoad) -> int:
    return wanted_groups(loads, SEQS, TARGETS).number


class TestTargetGroups:
    def test_as_many_as_the_requests_need(self) -> None:
        assert groups(GroupLoad(num_running=8)) == 1
        assert groups(GroupLoad(num_running=9)) == 2
        assert groups(GroupLoad(num_running=10, num_waiting=4), GroupLoad(num_running=6)) == 3

    def test_waiting_and_slow_rounds_ask_for_more_whatever_the_number_of_requests(self) -> None:
        assert groups(GroupLoad(num_running=4, queue_wait_s=1.5)) == 2
        assert groups(GroupLoad(num_running=4, round_s=0.12)) == 2
        assert groups(GroupLoad(num_running=4, round_s=0.08)) == 1
        assert groups(GroupLoad(num_running=0, round_s=0.5)) == 1  # of rounds long ago

    def test_no_signal_asks_for_more_than_twice_as_many(self) -> None:
        assert groups(*[GroupLoad(num_running=10, num_waiting=500, queue_wait_s=1e6)] * 2) == 4

    def test_fewer_only_when_the_others_stay_well_below_the_targets(self) -> None:
        two = [GroupLoad(num_running=4)] * 2
        assert groups(*two) == 2  # one would have 8 of 10: just the target
        assert groups(*[GroupLoad(num_running=2)] * 2) == 1
        assert groups(*[GroupLoad(num_running=1, round_s=0.05)] * 2) == 2  # 0.1 s on one: too near
        assert groups(*[GroupLoad(num_running=1, round_s=0.02)] * 2) == 1

    def test_full_is_who_has_no_memory_whatever_places_are_left(self) -> None:
        assert groups(GroupLoad(num_running=2, kv_usage=0.7)) == 1
        assert groups(GroupLoad(num_running=2, kv_usage=0.9)) == 2
        assert groups(GroupLoad(num_running=8, kv_usage=0.1)) == 1  # places say more
        assert groups(*[GroupLoad(num_running=2, kv_usage=0.5)] * 2) == 2  # one could not hold it
        assert groups(*[GroupLoad(num_running=2, kv_usage=0.2)] * 2) == 1
        assert groups(*[GroupLoad(num_running=2)] * 2) == 1

    def test_who_waits_is_taken_to_need_as_much_memory_as_who_runs(self) -> None:
        assert groups(GroupLoad(num_running=2, num_waiting=1, kv_usage=0.5)) == 1
        assert groups(GroupLoad(num_running=2, num_waiting=2, kv_usage=0.5)) == 2
        # Means over different moments: one request does not fill eighteen groups.
        assert groups(*[GroupLoad(num_running=0.05, num_waiting=0.5, kv_usage=0.9)] * 4) == 7
        assert groups(*[GroupLoad(num_running=0.01, num_waiting=0.1, kv_usage=0.3)] * 4) == 3

    @pytest.mark.parametrize("num_requests", [1, 3])
    def test_batches_of_one_request_do_not_get_faster(self, num_requests: int) -> None:
        """Whatever the bound, no more groups than requests are wanted, and these stay."""
        number = 1
        for _ in range(5):
            loads = [
                GroupLoad(num_running=len(range(index, num_requests, number)), round_s=10.0)
                for index in range(number)
            ]
            number = groups(*loads)
        assert number == num_requests
        spread = [GroupLoad(num_running=1, round_s=10.0)] * num_requests
        assert groups(*spread, *[GroupLoad()] * 4) == num_requests

    def test_large_batches_do(self) -> None:
        assert groups(*[GroupLoad(num_running=4, round_s=0.15)] * 2) == 3
        # Never more than there are requests: two groups, three of them, and twice the time.
        assert groups(GroupLoad(num_running=2, round_s=0.2), GroupLoad(num_running=1, round_s=0.2)) == 3

    def test_rounds_that_small_batches_do_not_shorten_ask_for_nobody(self) -> None:
        """They wait for the weights. One step is tried, and known for an hour to have brought nothing."""
        numbers = self.scaled(lambda batch: 0.105 + 0.0005 * batch, seconds=3000)
        assert (max(numbers), numbers[-1]) == (2, 1)
        assert sum(before != after for before, after in itertools.pairwise(numbers)) == 2
        again = self.scaled(lambda batch: 0.105 + 0.0005 * batch, seconds=9000)
        assert sum(before != after for before, after in itertools.pairwise(again)) <= 6

    def test_rounds_that_they_do_shorten_ask_for_as_many_as_it_takes(self) -> None:
        for each_s, number in ((0.012, 2), (0.02, 3), (0.03, 5)):
            numbers = self.scaled(lambda batch, each_s=each_s: 0.02 + each_s * batch, seconds=1500)
            assert 0.02 + each_s * 12 / numbers[-1] <= 0.1
            assert numbers[-1] == number, "and no more"
            assert len(set(numbers[-600:])) == 1

    def test_batches_of_about_one_size_say_nothing_of_others(self) -> None:
        """On either side of a border, the smaller one with the longer rounds: that is chance."""
        load, seen = GroupLoad(num_running=5.7, round_s=0.15), {}
        for second, (size, round_s) in enumerate([(5.6, 0.151), (5.7, 0.15)] * 20):
            seen = with_loads(seen, [GroupLoad(num_running=size, round_s=round_s)], float(second))
        assert len(seen) == 2
        assert wanted_groups([load], SEQS, TARGETS, seen).number == 2
        seen = with_loads(seen, [GroupLoad(num_running=2.8, round_s=0.149)], 100.0)
        assert wanted_groups([load], SEQS, TARGETS, seen).number == 1, "now it is known"

    def test_a_target_out_of_reach_is_approached_as_far_as_it_pays(self) -> None:
        numbers = self.scaled(lambda batch: 0.11 + 0.005 * batch, seconds=1500)
        assert numbers[-1] == 3, "twice as many would have 0.92 of the time"
        assert len(set(numbers[-600:])) == 1

    def scaled(self, round_s: Callable[[float], float], seconds: int) -> list[int]:
        """How many groups there are for twelve requests, whose rounds take as long as that."""
        config = TARGETS.model_copy(update={"up_after_s": 5, "down_after_s": 60, "cooldown_s": 10})
        policy = TargetGroupPolicy(config.model_dump(), 64, now_s=told_s)
        number, state, numbers = 1, {}, [1]
        for second in range(seconds):
            each = 12.0 / number
            report = group_stats({"num_requests_running": each}, round_s=round_s(each))
            reports = {f"replica{index}": dict(report) for index in range(number)}
            at_s = 5000.0 + second
            number, state = policy(context(reports, target=number, now_s=at_s, state=state, bounds=(1, 8)))
            state = pickle.loads(pickle.dumps(state))
            numbers.append(number)
        return numbers

    def test_nobody_there_is_idle(self) -> None:
        assert wanted_groups([], SEQS, TARGETS) == Wish(number=0, is_idle=True)
        assert wanted_groups([GroupLoad()] * 3, SEQS, TARGETS) == Wish(number=1, is_idle=True)

    def test_more_load_never_asks_for_fewer(self) -> None:
        wanted = [groups(*[GroupLoad(num_running=n)] * 3) for n in range(11)]
        assert wanted == sorted(wanted)


class TestDraftPool:
    def test_a_busy_pool_that_rounds_wait_for_gets_one_more(self) -> None:
        load = PoolLoad(num_workers=2, num_requests=8, usage=0.5, utilization=0.9, wait_share=0.3, worth=1.5)
        assert gain_of_one_more(load) == pytest.approx(0.1)
        assert wanted_workers(load, DRAFTS).number == 3

    def test_drafting_that_is_hidden_asks_for_nobody(self) -> None:
        hidden = PoolLoad(
            num_workers=2, num_requests=8, utilization=0.9, wait_share=0.01, hidden_share=0.99, worth=1.5
        )
        assert wanted_workers(hidden, DRAFTS).number == 2

    def test_a_full_pool_leaves_requests_out_which_costs_what_drafts_are_worth(self) -> None:
        full = PoolLoad(num_workers=1, num_requests=80, usage=1.0, utilization=0.2, worth=1.6)
        assert wanted_workers(full, DRAFTS).number == 2
        worthless = PoolLoad(num_workers=1, num_requests=80, usage=1.0, utilization=0.2, worth=1.01)
        assert wanted_workers(worthless, DRAFTS).number == 1

    def test_a_pool_that_is_worth_nothing_shrinks(self) -> None:
        load = PoolLoad(
            num_workers=4, num_requests=80, usage=1.0, utilization=1.0, wait_share=0.5, worth=0.97
        )
        assert wanted_workers(load, DRAFTS).number == 1

    def test_one_less_where_that_costs_little_and_the_rest_can_do_it(self) -> None:
        idle = PoolLoad(num_workers=4, num_requests=8, usage=0.1, utilization=0.2, wait_share=0.02, worth=1.5)
        assert loss_of_one_less(idle) < DRAFTS.min_gain / 2
        assert wanted_workers(idle, DRAFTS).number == 3
        waiting = PoolLoad(
            num_workers=2, num_requests=8, usage=0.1, utilization=0.3, wait_share=0.2, worth=1.5
        )
        assert wanted_workers(waiting, DRAFTS).number == 2

    def test_what_was_hidden_may_show_when_one_leaves(self) -> None:
        barely = PoolLoad(
            num_workers=2, num_requests=8, utilization=0.75, wait_share=0.0, hidden_share=1.0, worth=1.5
        )
        assert loss_of_one_less(barely) == pytest.approx(0.5)

    def test_a_worker_that_groups_share_has_less_time_for_each(self) -> None:
        """Drafting takes a third of each round, and keeps two workers busy: one had twice what it can."""
        shared = PoolLoad(
            num_workers=2, num_requests=8, utilization=1.0, drafting_share=0.3, hidden_share=1.0, worth=1.5
        )
        assert loss_of_one_less(shared) == pytest.approx(1.0)

    def test_with_idle_time_between_rounds_they_are_as_long_as_ever(self) -> None:
        seldom = PoolLoad(
            num_workers=2, num_requests=8, utilization=0.1, drafting_share=0.75, hidden_share=1.0, worth=1.5
        )
        assert loss_of_one_less(seldom) == pytest.approx(0.5)
        assert wanted_workers(seldom, DRAFTS).number == 2

    def test_no_more_workers_than_requests(self) -> None:
        """A request is drafted for by one: others have nothing to do, however long that one takes."""
        each_has_one = PoolLoad(num_workers=3, num_requests=3, utilization=0.9, wait_share=0.3, worth=1.5)
        assert wanted_workers(each_has_one, DRAFTS).number == 3
        assert wanted_workers(replace(each_has_one, num_requests=3.4), DRAFTS).number == 4
        assert wanted_workers(replace(each_has_one, num_workers=6), DRAFTS).number == 5
        eager = DRAFTS.model_copy(update={"min_gain": 0.0})
        assert wanted_workers(each_has_one, eager).number == 3

    @pytest.mark.parametrize("at_first", [1, 8])
    def test_a_stream_of_each_of_three_groups_needs_no_eight_workers(self, at_first: int) -> None:
        """In lockstep, drafting for 30 % of each round: a worker alone would be busy for 90 % of the time."""
        number = at_first
        for _ in range(20):
            demands = [
                DraftDemand(
                    num_requests=1.0,
                    utilization=0.3 / number,
                    wait_share=0.3,
                    hidden_share=0.0,
                    worth=1.5,
                    drafting_share=0.3,
                )
            ] * 3
            reports = [{"usage": 0.1, **pool_stats(demands)}] * number
            number = wanted_workers(pool_load(reports), DRAFTS).number
        assert 2 <= number <= 3

    def test_nothing_known_changes_nothing(self) -> None:
        assert wanted_workers(PoolLoad(num_workers=2, num_requests=3, usage=0.7), DRAFTS).number == 2
        assert wanted_workers(PoolLoad(num_workers=2), DRAFTS) == Wish(number=1, is_idle=True)

    def test_a_group_whose_target_is_being_loaded_changes_nothing(self) -> None:
        """For minutes nothing is drafted, which is not to say that its workers have nothing to do."""
        loading = demand_of({"num_requests_waiting": 5.0}, None)
        assert pool_stats([loading]) == {"num_requests": 5.0}
        report = {"usage": 0.0, **pool_stats([loading])}
        assert wanted_workers(pool_load([report] * 2), DRAFTS).number == 2
        serving = DraftDemand(
            num_requests=5.0, utilization=0.6, wait_share=0.2, hidden_share=0.0, worth=1.5, drafting_share=0.2
        )
        shares = {**pool_stats([serving]), "num_requests": 10.0}
        assert pool_stats([serving, loading]) == pytest.approx(shares)
        idle = msgspec.structs.replace(serving, num_requests=0.0, utilization=0.0)
        assert "utilization" not in pool_stats([idle, loading])

    def test_readers_of_another_version_can_add_up_what_is_not_known(self) -> None:
        """Draft workers that an update is about to replace add all shares up, whosever they are."""
        loading, known = demand_of({"num_requests_waiting": 5.0}, None), 0.6
        assert min(1.0, sum((known, loading.utilization))) == 1.0, "busy: no worker is given up for it"
        assert loading.wait_share * 5.0 + loading.drafting_share * 5.0 == 0.0
        assert pool_stats([pickle.loads(pickle.dumps(loading))]) == {"num_requests": 5.0}
        fields = {"num_requests", "utilization", "wait_share", "hidden_share", "worth", "drafting_share"}
        assert set(DraftDemand.__struct_fields__) == fields, "one that they do not know they could not read"

    def test_demands_of_coordinators_come_together_by_their_requests(self) -> None:
        recent = RecentStatus(
            num_rounds=10, tokens_per_s=1.0, acceptance=0.5, acceptance_by_method={},
            mean_acceptance_length=2.0, round_s=0.1, draft_wait_s=0.02, draft_s=0.05, verify_s=0.07,
            coordinator_s=0.01, hidden_share=0.6, hit_rate=None, late_rate=None,
        )  # fmt: skip
        metrics = {"num_requests_running": 9.0, "speculation_pool_worth": 2.0, "draft_utilization": 0.4}
        busy = demand_of(metrics, recent)
        idle = demand_of({}, None)
        assert pool_stats([busy, idle]) == pytest.approx(
            {
                "num_requests": 9.0,
                "utilization": 0.4,
                "wait_share": 0.2,
                "drafting_share": 0.5,
                "hidden_share": 0.6,
                "worth": 2.0,
            }
        )
        assert pool_stats([idle]) == {"num_requests": 0.0}
        other = DraftDemand(num_requests=3.0, utilization=0.7, wait_share=0.0, hidden_share=None, worth=1.0)
        both = pool_stats([busy, other])
        assert both["utilization"] == 1.0
        assert both["wait_share"] == pytest.approx(0.15)
        assert both["drafting_share"] == pytest.approx(0.375)
        assert both["worth"] == pytest.approx(1.75)

    def test_a_group_that_drafts_nothing_takes_no_worker_from_one_that_gains(self) -> None:
        def of(num_requests: float, worth: float) -> DraftDemand:
            return DraftDemand(
                num_requests=num_requests, utilization=0.2, wait_share=0.0, hidden_share=None, worth=worth
            )

        gains, loses = of(4.0, 1.5), of(24.0, 0.7)
        assert pool_stats([gains, loses])["worth"] == pytest.approx((4 * 1.5 + 24 * 1.0) / 28)
        assert pool_stats([loses, loses])["worth"] == 1.0, "nobody gains: the pool is worth nothing"


class Run:
    """Decides every second, from wishes, as Serve would carry them out."""

    def __init__(self, number: int = 1, low: int = 1, high: int = 8, start_s: int = 0) -> None:
        self.number, self.low, self.high, self.start_s = number, low, high, start_s
        self.memory = ScalingMemory()
        self.now_s = 1000.0
        self.ready_s: list[float] = [0.0] * number

    def seconds(self, seconds: int, wish: Wish) -> list[int]:
        numbers = []
        for _ in range(seconds):
            self.now_s += 1.0
            num_ready = sum(ready_s <= self.now_s for ready_s in self.ready_s)
            fleet = Fleet(num_asked_for=self.number, num_ready=num_ready, low=self.low, high=self.high)
            self.number, self.memory = decide(wish, fleet, self.memory, TARGETS_PACE, self.now_s)
            self.ready_s = [*self.ready_s, *[self.now_s + self.start_s] * self.number][: self.number]
            numbers.append(self.number)
        return numbers


TARGETS_PACE = TargetScalingConfig(
    max_groups=8,
    up_after_s=10,
    down_after_s=60,
    cooldown_s=30,
    start_patience_s=600,
    scale_to_zero_after_s=120,
)


class TestPace:
    def test_up_after_it_was_wanted_long_enough_without_a_break(self) -> None:
        run = Run()
        assert run.seconds(10, Wish(number=3))[-1] == 1
        run.seconds(1, Wish(number=1))
        assert run.seconds(10, Wish(number=3))[-1] == 1
        assert run.seconds(1, Wish(number=3)) == [3]

    def test_down_to_the_most_that_were_wanted_meanwhile(self) -> None:
        """A lull at the last moment says nothing of the minutes before."""
        run = Run(number=8)
        run.seconds(58, Wish(number=7))
        assert run.seconds(10, Wish(number=1))[-1] == 7
        numbers = run.seconds(62, Wish(number=1))
        assert (numbers[0], numbers[-1]) == (7, 1)

    def test_a_clock_that_is_set_back_holds_nothing_up(self) -> None:
        run = Run()
        run.ready_s = [-math.inf]
        assert run.seconds(6, Wish(number=3))[-1] == 1
        run.now_s -= 3600.0
        assert run.seconds(11, Wish(number=3))[-1] == 3
        run.ready_s = [-math.inf] * 3
        run.now_s -= 3600.0
        assert run.seconds(61, Wish(number=1))[-1] == 1

    def test_not_again_while_the_last_ones_are_still_starting(self) -> None:
        run = Run(start_s=100)
        assert run.seconds(60, Wish(number=2))[-1] == 2
        assert max(run.seconds(40, Wish(number=4))) == 2
        assert run.seconds(30, Wish(number=4))[-1] == 4

    def test_what_is_still_starting_is_not_given_up_however_long_it_takes(self) -> None:
        """Longer than `down_after_s`: that those that serve are enough now says nothing against it."""
        run = Run(start_s=300)
        assert run.seconds(11, Wish(number=2))[-1] == 2
        assert set(run.seconds(299, Wish(number=1))) == {2}
        assert set(run.seconds(60, Wish(number=1))) == {2}, "it serves: now it may be one too many"
        assert run.seconds(1, Wish(number=1)) == [1]

    def test_one_that_never_starts_does_not_keep_the_others(self) -> None:
        run = Run(number=2, start_s=100_000)
        assert run.seconds(11, Wish(number=3))[-1] == 3
        assert run.seconds(600, Wish(number=2))[-1] == 3
        assert run.seconds(61, Wish(number=1))[-1] == 1
        idle = Run(low=0, start_s=100_000)
        assert idle.seconds(11, Wish(number=2))[-1] == 2
        assert idle.seconds(120, Wish(number=1, is_idle=True))[-1] == 2
        assert idle.seconds(2, Wish(number=1, is_idle=True)) == [1, 0]

    def test_for_one_that_never_starts_another_is_asked_for(self) -> None:
        """A group on a bad node must not keep the load from those that would start elsewhere."""
        run = Run(number=2, start_s=50)
        run.ready_s = [0.0, math.inf]
        assert set(run.seconds(599, Wish(number=2))) == {2}
        numbers = run.seconds(100, Wish(number=2))
        assert numbers[-1] == 3
        assert run.seconds(60, Wish(number=4))[-1] == 3, "the new one has its time, too"
        more = run.seconds(1200, Wish(number=4))
        assert more[-1] == 5, "four that serve, and one that does not"
        assert set(run.seconds(2000, Wish(number=4))) == {5}

    def test_where_some_should_always_serve_they_are_missed_though_nobody_asks(self) -> None:
        run = Run(start_s=50)
        run.ready_s = [math.inf]
        assert run.seconds(620, Wish(number=0, is_idle=True))[-1] == 2

    def test_replacements_stay_within_the_bounds(self) -> None:
        run = Run(number=2, high=4, start_s=100_000)
        run.ready_s = [0.0, math.inf]
        assert max(run.seconds(20_000, Wish(number=2))) == 4
        run.ready_s = [0.0] * 4
        assert run.seconds(100, Wish(number=2))[-1] == 2

    def test_while_one_after_the_other_comes_nobody_is_missed(self) -> None:
        run = Run(number=4)
        run.ready_s = [0.0, *(run.now_s + 500.0 * number for number in (1, 2, 3))]
        assert set(run.seconds(1600, Wish(number=4))) == {4}

    def test_nobody_is_idle_who_does_not_serve_yet(self) -> None:
        run = Run(low=0)
        run.ready_s = [5000.0]
        assert set(run.seconds(1000, Wish(number=0, is_idle=True))) == {1}

    def test_down_after_calm_and_never_back_and_forth(self) -> None:
        run = Run(number=4)
        assert run.seconds(60, Wish(number=2))[-1] == 4
        assert run.seconds(1, Wish(number=2)) == [2]
        changes = run.seconds(600, Wish(number=2)) + [
            n for _ in range(300) for n in run.seconds(1, Wish(number=1 + _ % 3))
        ]
        assert set(changes) == {2}

    def test_the_bounds_hold_whatever_is_wished(self) -> None:
        run = Run(low=2, high=3, number=2)
        assert max(run.seconds(100, Wish(number=100))) == 3
        assert min(run.seconds(500, Wish(number=0, is_idle=True))) == 2
        narrowed = Run(low=1, high=2, number=5)
        assert narrowed.seconds(1, Wish(number=5)) == [2]

    def test_to_zero_from_idleness_alone_and_back_at_once(self) -> None:
        run = Run(low=0)
        assert run.seconds(119, Wish(number=1, is_idle=True))[-1] == 1
        run.seconds(1, Wish(number=1))
        assert run.seconds(120, Wish(number=1, is_idle=True))[-1] == 1
        assert run.seconds(1, Wish(number=1, is_idle=True)) == [0]
        assert set(run.seconds(500, Wish(number=0, is_idle=True))) == {0}
        assert run.seconds(1, Wish(number=1)) == [1]
        assert min(run.seconds(100, Wish(number=1))) == 1

    def test_several_go_one_step_before_zero(self) -> None:
        run = Run(low=0, number=3)
        numbers = run.seconds(200, Wish(number=1, is_idle=True))
        assert numbers[-1] == 0
        assert 1 in numbers


class TestInServe:
    def test_target_groups_rise_and_fall_with_what_coordinators_report(self) -> None:
        config = TargetScalingConfig(min_groups=1, max_groups=4, up_after_s=5, down_after_s=20, cooldown_s=0)
        policy = TargetGroupPolicy(config.model_dump(), SEQS, now_s=told_s)
        number, state, numbers = 1, {}, []
        for second in range(120):
            busy = second < 40
            metrics = {
                "num_requests_running": 10.0 if busy else 0.0,
                "num_requests_waiting": 8.0 if busy else 0.0,
            }
            report = group_stats(metrics, round_s=0.01)
            reports = {f"replica{index}": dict(report) for index in range(number)}
            at_s = 5000.0 + second
            number, state = policy(context(reports, target=number, now_s=at_s, state=state, bounds=(1, 4)))
            numbers.append(number)
        assert max(numbers) == 4
        assert numbers[4] == 1
        assert numbers[-1] == 1
        assert numbers[: numbers.index(4)] == sorted(numbers[: numbers.index(4)])

    @pytest.mark.parametrize("knows_memory", [True, False])
    def test_where_memory_is_the_limit_groups_do_not_come_and_go(self, knows_memory: bool) -> None:
        """Fifteen clients, each with a request at all times; a group has memory for ten and places for 64.

        Two groups leave most places free and nobody waiting. Who looks at that alone gives one up, and has
        clients wait until it is there again: that is the negative control.
        """
        config = TargetScalingConfig(min_groups=1, max_groups=4, up_after_s=5, down_after_s=20, cooldown_s=0)
        policy = TargetGroupPolicy(config.model_dump(), 64, now_s=told_s)
        number, state, numbers = 1, {}, [1]
        for second in range(600):
            reports = {}
            for index in range(number):
                own = len(range(index, 15, number))
                running = min(own, 10)
                metrics = {
                    "num_requests_running": float(running),
                    "num_requests_waiting": float(own - running),
                    "queue_wait_seconds": 0.5 * (own - running),
                    "kv_cache_usage_perc": running / 10 if knows_memory else 0.0,
                }
                reports[f"replica{index}"] = group_stats(metrics, round_s=0.01)
            at_s = 5000.0 + second
            number, state = policy(context(reports, target=number, now_s=at_s, state=state, bounds=(1, 4)))
            numbers.append(number)
        num_changes = sum(before != after for before, after in itertools.pairwise(numbers))
        if knows_memory:
            assert (num_changes, numbers[-1]) == (1, 2)
        else:
            assert num_changes > 10

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_reports_that_are_no_numbers_are_as_if_they_had_not_come(self, value: float) -> None:
        config = TargetScalingConfig(min_groups=1, max_groups=4, up_after_s=5, down_after_s=20, cooldown_s=0)
        policy = TargetGroupPolicy(config.model_dump(), SEQS, now_s=told_s)
        good = group_stats({"num_requests_running": 10.0, "num_requests_waiting": 8.0}, round_s=0.01)
        bad = dict.fromkeys(good, value)
        number, state = 2, {}
        for second in range(30):
            reports = {"replica0": good, "replica1": bad}
            number, state = policy(
                context(reports, target=number, now_s=5000.0 + second, state=state, bounds=(1, 4))
            )
            assert 2 <= number <= 4

    def test_a_controller_that_remembers_nothing_takes_down_no_sooner_for_it(self) -> None:
        """It was restarted, or something was deployed, just after a change."""
        config = TargetScalingConfig(
            min_groups=1, max_groups=4, up_after_s=5, down_after_s=10, cooldown_s=300
        )
        policy = TargetGroupPolicy(config.model_dump(), SEQS, now_s=told_s)
        idle = {f"replica{index}": group_stats({}, round_s=None) for index in range(3)}
        number, state, numbers = 3, {}, []
        for second in range(400):
            at_s = 5000.0 + second
            number, state = policy(context(idle, target=number, now_s=at_s, state=state, bounds=(1, 4)))
            numbers.append(number)
        assert set(numbers[:299]) == {3}
        assert numbers[-1] == 1

    def test_what_serve_has_started_by_itself_is_not_idle_since_long_ago(self) -> None:
        config = TargetScalingConfig(min_groups=0, max_groups=4, scale_to_zero_after_s=30)
        policy = TargetGroupPolicy(config.model_dump(), SEQS, now_s=told_s)
        idle = {"replica": group_stats({}, round_s=None)}
        number, state = 1, {}
        for second in range(40):
            number, state = policy(context(idle, target=number, now_s=second, state=state, bounds=(0, 4)))
        assert number == 0
        for second in range(40, 500, 10):
            number, state = policy(context({}, target=number, now_s=second, state=state, bounds=(0, 4)))
        assert number == 0
        for second in range(500, 529):  # a call waited for a replica: Serve has asked for one
            number, state = policy(context(idle, target=1, now_s=second, state=state, bounds=(0, 4)))
            assert number == 1

    def test_a_group_that_is_loaded_anew_is_not_given_up_where_both_are_needed(self) -> None:
        """One of two has died. The other runs 70 % of what it can, more than it should have for good."""
        config = TargetScalingConfig(min_groups=1, max_groups=4, up_after_s=5, down_after_s=20, cooldown_s=0)
        policy = TargetGroupPolicy(config.model_dump(), SEQS, now_s=told_s)
        left = group_stats({"num_requests_running": 7.0}, round_s=0.01)
        half = group_stats({"num_requests_running": 3.5}, round_s=0.01)
        number, state = 2, {}
        for second in range(200):
            reports = {"a": left} if second < 100 else {"a": half, "b": half}
            at_s = 5000.0 + second
            number, state = policy(context(reports, target=number, now_s=at_s, state=state, bounds=(1, 4)))
            assert number == 2

    @pytest.mark.parametrize("is_told", [True, False])
    def test_a_group_without_a_target_is_no_empty_one(self, is_told: bool) -> None:
        """The other is full, and who comes now waits too long: a third is wanted once that may never serve.

        Where it is not told, the one without a target looks as if it had all places free.
        """
        config = TargetScalingConfig(min_groups=1, max_groups=4, up_after_s=5, start_patience_s=60)
        policy = TargetGroupPolicy(config.model_dump(), SEQS, now_s=told_s)
        full = {"num_requests_running": float(SEQS), "num_requests_waiting": 5.0, "queue_wait_seconds": 1.8}
        reports = {
            "a": group_stats(full, round_s=0.01),
            "b": group_stats({}, round_s=None, has_target=not is_told),
        }
        number, state, numbers = 2, {}, []
        for second in range(100):
            at_s = 5000.0 + second
            number, state = policy(context(reports, target=number, now_s=at_s, state=state, bounds=(1, 4)))
            numbers.append(number)
        assert set(numbers[:60]) == {2}
        assert (numbers[-1] > 2) == is_told

    def test_what_waits_where_no_target_is_keeps_nobody_from_being_wanted(self) -> None:
        lost = group_stats({"num_requests_waiting": 30.0}, round_s=None, has_target=False)
        serving = group_stats({"num_requests_running": 4.0}, round_s=0.01)
        config = TargetScalingConfig(
            min_groups=1, max_groups=4, up_after_s=0, down_after_s=5, cooldown_s=0, start_patience_s=1.0
        )
        policy = TargetGroupPolicy(config.model_dump(), SEQS, now_s=told_s)
        reports = {"a": serving, "b": lost}
        number, state = policy(context(reports, target=2, now_s=1.0, state={}, bounds=(1, 4)))
        number, _ = policy(context(reports, target=number, now_s=2.0, state=state, bounds=(1, 4)))
        assert number == 3, "the two that are wanted, and one in the place of who may never serve"
        assert wanted_groups([], SEQS, TARGETS, num_waiting_elsewhere=1.0).is_idle is False

    def test_a_wall_clock_that_is_set_forward_makes_no_wish_last_longer(self) -> None:
        config = TargetScalingConfig(min_groups=1, max_groups=4, down_after_s=300, cooldown_s=0)
        policy = TargetGroupPolicy(config.model_dump(), SEQS)
        idle = {name: group_stats({}, round_s=None) for name in "abc"}
        number, state = policy(context(idle, target=3, now_s=1000.0, state={}, bounds=(1, 4)))
        number, _ = policy(context(idle, target=number, now_s=9000.0, state=state, bounds=(1, 4)))
        assert number == 3

    def test_a_draft_worker_that_loads_for_long_is_not_given_up(self) -> None:
        config = DraftScalingConfig(min_workers=1, max_workers=3, up_after_s=0, down_after_s=10, cooldown_s=0)
        policy = DraftPoolPolicy(config.model_dump(), now_s=told_s)
        report = {"usage": 0.9, "num_requests": 9.0, "utilization": 0.9, "wait_share": 0.4, "worth": 1.5}
        number, state = policy(context({"a": report}, target=1, now_s=1.0, state={}, bounds=(1, 3)))
        assert number == 2
        report |= {"usage": 0.1, "utilization": 0.5}
        for second in range(2, 100):
            number, state = policy(
                context({"a": report}, target=number, now_s=float(second), state=state, bounds=(1, 3))
            )
            assert number == 2

    def test_draft_workers_follow_their_coordinators(self) -> None:
        config = DraftScalingConfig(min_workers=1, max_workers=3, up_after_s=0, down_after_s=0, cooldown_s=0)
        policy = DraftPoolPolicy(config.model_dump(), now_s=told_s)
        report = {"usage": 0.9, "num_requests": 9.0, "utilization": 0.9, "wait_share": 0.4, "worth": 1.5}
        number, state = policy(context({"a": report}, target=1, now_s=1.0, state={}, bounds=(1, 3)))
        assert number == 2
        report |= {"worth": 0.9}
        number, state = policy(
            context({"a": report, "b": report}, target=2, now_s=2.0, state=state, bounds=(1, 3))
        )
        assert number == 1

    @pytest.mark.parametrize(
        ("policy", "arguments"),
        [
            (TargetGroupPolicy, {"config": TARGETS.model_dump(), "max_num_seqs": SEQS}),
            (DraftPoolPolicy, {"config": DRAFTS.model_dump()}),
        ],
    )
    def test_serve_takes_the_options_and_finds_the_policy(
        self, policy: type, arguments: dict[str, Any]
    ) -> None:
        options = autoscaling_options(policy, arguments, bounds=(0, 4), initial=2)
        config = AutoscalingConfig(**options)
        assert isinstance(config.policy.get_policy()(**config.policy.policy_kwargs), policy)


class TestConfig:
    def test_contradictory_bounds_are_named(self) -> None:
        with pytest.raises(ValueError, match=r"min_groups \(3\) must be at most max_groups \(2\)"):
            TargetScalingConfig(min_groups=3, max_groups=2)
        with pytest.raises(ValueError, match=r"min_workers \(3\) must be at most max_workers \(2\)"):
            DraftScalingConfig(min_workers=3, max_workers=2)

    def test_the_number_at_first_is_within_the_bounds(self) -> None:
        scaling = {"min_groups": 2, "max_groups": 4}
        assert TargetGroupsConfig.model_validate({"autoscaling": scaling}).initial_groups == 2
        with pytest.raises(ValueError, match=r"num_groups \(5\) is how many .*min_groups \(2\) to .* \(4\)"):
            TargetGroupsConfig.model_validate({"num_groups": 5, "autoscaling": scaling})
        with pytest.raises(ValueError, match=r"num_workers \(1\) .* autoscaling.min_workers \(2\)"):
            DraftPoolConfig.model_validate(
                {"num_workers": 1, "autoscaling": {"min_workers": 2, "max_workers": 2}}
            )
        assert (
            DraftPoolConfig.model_validate(
                {"autoscaling": {"min_workers": 0, "max_workers": 2}}
            ).initial_workers
            == 1
        )

    def test_what_there_may_be_at_most_is_what_has_to_fit(self) -> None:
        config = ClusterConfig.model_validate(
            {
                "target_groups": {"autoscaling": {"max_groups": 5}},
                "draft_pool": {"num_workers": 2, "autoscaling": {"max_workers": 3}},
            }
        )
        most = config.at_most()
        assert (most.target_groups.num_groups, most.draft_pool.num_workers) == (5, 3)
        assert config.draft_shares(8).max_sequences == 40
