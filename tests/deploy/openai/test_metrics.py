"""The Prometheus text: kinds, meanings, and that operators can look every name up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.series import CLUSTER_SERIES
from deploy.openai.metrics import PREFIX, DoorMetrics, render

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text()


def text_of(snapshot: dict[str, float]) -> str:
    return render(DoorMetrics(), snapshot).decode()


def test_gauges_are_gauges_and_counters_are_counters_with_a_meaning() -> None:
    text = text_of(
        {
            "speculation_pool_worth": 1.3,
            'speculation_state{mode="ping_pong",reason="gain"}': 2.0,
            "draft_workers": 3.0,
            "drafting_time_seconds": 4.5,
        }
    )
    assert "# TYPE ray_drafthouse_speculation_pool_worth gauge" in text
    assert "ray_drafthouse_speculation_pool_worth 1.3" in text
    assert 'ray_drafthouse_speculation_state{mode="ping_pong",reason="gain"} 2.0' in text
    assert "ray_drafthouse_draft_workers 3.0" in text
    assert "ray_drafthouse_drafting_time_seconds_total 4.5" in text
    for name in ("speculation_pool_worth", "speculation_state", "draft_workers"):
        assert f"# HELP {PREFIX}{name} {CLUSTER_SERIES[name].help}" in text


def test_what_a_newer_worker_counts_is_shown_without_a_kind() -> None:
    text = text_of({'of_tomorrow{kind="x"}': 2.0})
    assert 'ray_drafthouse_of_tomorrow{kind="x"} 2.0' in text
    assert "# TYPE ray_drafthouse_of_tomorrow untyped" in text


@pytest.mark.parametrize("name", sorted(CLUSTER_SERIES))
def test_operators_can_look_it_up(name: str) -> None:
    assert re.search(rf"`{name}(\{{[^`]*\}})?`", PAGE), f"docs/operations.md does not explain {name}"


def test_operators_can_look_up_what_the_door_counts() -> None:
    names = {metric.name.removeprefix(PREFIX) for metric in DoorMetrics().registry.collect()}
    missing = {name for name in names if f"`{name}" not in PAGE}
    assert not missing
