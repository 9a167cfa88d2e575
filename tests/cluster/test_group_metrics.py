"""Counters of groups that are late, gone, or begin anew."""

from __future__ import annotations

import random

from cluster.group_metrics import GroupMetrics
from cluster.series import CLUSTER_SERIES
from specdec.core.series import name_of
from specdec.transport.base import PeerId

A, B = PeerId("a"), PeerId("b")


def told(rounds: float, running: float = 1.0, **more: float) -> dict[str, float]:
    return {"rounds": rounds, "num_requests_running": running, **more}


def test_groups_are_added_up() -> None:
    groups = GroupMetrics()
    groups.hear({A: told(3), B: told(4, running=2)})
    values = groups.values([A, B])
    assert (values["rounds"], values["num_requests_running"]) == (7, 3)
    assert values['target_group_rounds{target_group="b"}'] == 4


def test_a_group_that_does_not_answer_in_time_is_as_it_was() -> None:
    groups = GroupMetrics()
    groups.hear({A: told(3), B: told(4)})
    groups.hear({A: told(5)})
    assert groups.values([A, B])["rounds"] == 9
    groups.hear({})
    assert groups.values([A, B])["rounds"] == 9


def test_a_group_that_is_gone_leaves_what_it_had_counted_and_nothing_else() -> None:
    groups = GroupMetrics()
    groups.hear({A: told(3, running=5), B: told(4, running=2)})
    values = groups.values([B])
    assert (values["rounds"], values["num_requests_running"]) == (7, 2)
    assert 'target_group_rounds{target_group="a"}' not in values
    groups.hear({A: told(4), B: told(4)})
    assert groups.values([A, B])["rounds"] == 8


def test_a_new_engine_counts_on_from_the_one_before() -> None:
    groups = GroupMetrics()
    dropped = 'spec_decode_num_proposals_dropped{reason="late"}'
    groups.hear({A: told(10, **{dropped: 2.0})})
    groups.hear({A: told(1)})
    groups.hear({A: told(4)})
    groups.hear({A: told(2, **{dropped: 1.0})})
    values = groups.values([A])
    assert values["rounds"] == 10 + 4 + 2
    assert values[dropped] == 3


def test_counters_never_fall_whatever_happens() -> None:
    rng = random.Random(5)
    groups, before = GroupMetrics(), {}
    counts = dict.fromkeys((PeerId(str(number)) for number in range(4)), 0)
    for _ in range(400):
        for group in counts:
            counts[group] = 0 if rng.random() < 0.05 else counts[group] + rng.randrange(3)
        groups.hear({group: told(count) for group, count in counts.items() if rng.random() < 0.7})
        values = groups.values([group for group in counts if rng.random() < 0.8])
        for series, value in values.items():
            if CLUSTER_SERIES[name_of(series)].kind != "gauge" and not series.startswith("target_group_"):
                assert value >= before.get(series, 0.0), series
        before = values
    assert before["rounds"] > max(counts.values())


def test_without_a_group_nothing_is_said_of_any() -> None:
    assert "rounds" not in GroupMetrics().values([])
