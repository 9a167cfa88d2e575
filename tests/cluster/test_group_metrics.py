"""Counters of groups that are late, gone, or begin anew."""

from __future__ import annotations

import random

import pytest

from cluster import group_metrics
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


def test_of_a_group_that_others_have_told_of_counts_what_it_counts_from_then_on() -> None:
    """A keeper of the account that has never heard it, because it was silent, has its number in the sum."""
    groups = GroupMetrics()
    groups.hear({A: told(3)})
    groups.count_as_told([A, B])
    groups.hear({B: told(50)})
    assert groups.values([A, B])["rounds"] == 3
    groups.hear({A: told(4), B: told(54)})
    assert groups.values([A, B])["rounds"] == 8


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


def test_what_a_thousand_groups_have_counted_takes_no_more_room_than_that_of_a_few() -> None:
    groups, total = GroupMetrics(), 0.0
    for number in range(1000):
        group = PeerId(f"group-{number}")
        groups.hear({group: told(number, running=1.0, generation_tokens=2.0)})
        total += number
        values = groups.values([group])
        assert (values["rounds"], values["num_requests_running"]) == (total, 1)
    assert values["generation_tokens"] == 2000
    assert len(groups._told) == len(groups._of_former_engines) <= group_metrics._MOST_APART + 1


@pytest.mark.parametrize("num_others", [3, 200])
def test_a_group_that_was_only_cut_off_is_not_counted_twice(num_others: int) -> None:
    """However many others have come and gone meanwhile; what it counts from then on is counted."""
    groups = GroupMetrics()
    groups.hear({A: told(100), B: told(1)})
    before = groups.values([A, B])["rounds"]
    others = [PeerId(f"other-{number}") for number in range(num_others)]
    for other in others:
        groups.hear({other: told(1)})
        groups.values([B, other])
    assert groups.values([B])["rounds"] == before + num_others
    assert groups.has_heard([A, B]) == (num_others <= group_metrics._MOST_APART)
    groups.hear({A: told(100)})
    assert groups.has_heard([A, B])
    assert groups.values([A, B])["rounds"] == before + num_others
    groups.hear({A: told(107)})
    assert groups.values([A, B])["rounds"] == before + num_others + 7
    groups.hear({A: told(2)})  # a new engine
    assert groups.values([A, B])["rounds"] == before + num_others + 9
    for other in others:
        groups.values([B, other])
    assert groups.values([B])["rounds"] == before + num_others + 9


def test_a_report_that_comes_late_counts_though_its_group_is_gone() -> None:
    groups = GroupMetrics()
    groups.hear({A: told(3), B: told(4)})
    assert groups.values([B])["rounds"] == 7
    groups.hear({A: told(5)})
    assert groups.values([B])["rounds"] == 9


def test_those_that_are_gone_are_added_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The door's event loop does it, every two seconds."""
    groups, num_added = GroupMetrics(), []
    gone = [PeerId(f"gone-{number}") for number in range(20)]
    groups.hear({group: told(1) for group in (A, *gone)})
    combine = group_metrics.combine

    def counting(snapshots: list[dict[str, float]], known: object) -> dict[str, float]:
        num_added.append(len(snapshots))
        return combine(snapshots, known)

    monkeypatch.setattr(group_metrics, "combine", counting)
    for _ in range(5):
        groups.hear({A: told(1)})
        assert groups.values([A])["rounds"] == 21
    assert sum(num_added) <= 20 + 1 + 5 * 2


def test_without_a_group_nothing_is_said_of_any() -> None:
    assert "rounds" not in GroupMetrics().values([])
