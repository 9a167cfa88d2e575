"""A real Prometheus evaluates everything that dashboards and rules say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.monitoring.dashboards import ALL_DASHBOARDS
from deploy.monitoring.promql import PREFIX
from deploy.monitoring.rule import Recording
from deploy.monitoring.rules import rule_groups, rules_yaml
from tests.deploy.monitoring.exposition import growing_endpoint
from tests.deploy.monitoring.expressions import filled
from tests.deploy.monitoring.prometheus import WINDOW, Prometheus, needs_prometheus, running_prometheus

pytestmark = [needs_prometheus, pytest.mark.slow]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has scraped a few seconds of an endpoint in which everything happens."""
    with (
        growing_endpoint() as target,
        running_prometheus(tmp_path_factory.mktemp("prometheus"), target, rules_yaml()) as running,
    ):
        running.wait_for(f"rate({PREFIX}rounds_total[{WINDOW}]) > 0")
        yield running


def test_every_panel_shows_something(prometheus: Prometheus) -> None:
    for page in ALL_DASHBOARDS:
        for panel in page.panels:
            for query in panel.queries:
                values = prometheus.values(filled(query.expression, WINDOW))
                assert values, f"{page.title}, {panel.title}: nothing for {query.legend}"
                assert all(map(math.isfinite, values)), f"{page.title}, {panel.title}: {values}"


def test_a_panel_of_another_name_would_show_nothing(prometheus: Prometheus) -> None:
    assert not prometheus.values(f"max by (job) (rate({PREFIX}round_total[{WINDOW}]))")


def test_every_rule_is_evaluated_without_error(prometheus: Prometheus) -> None:
    recorded = [rule.name for group in rule_groups() for rule in group.rules if isinstance(rule, Recording)]
    prometheus.wait_for(" and ".join(recorded))
    groups = prometheus.get("rules")["groups"]
    names = {rule["name"] for group in groups for rule in group["rules"]}
    assert names == {rule.name for group in rule_groups() for rule in group.rules}
    wrong = [rule for group in groups for rule in group["rules"] if rule["health"] == "err"]
    assert not wrong


def test_what_the_pager_says_is_filled_in(prometheus: Prometheus) -> None:
    prometheus.wait_for('ALERTS{alertname="DrafthouseStreamsLost",alertstate="firing"}')
    alerts = prometheus.get("alerts")["alerts"]
    for alert in alerts:
        text = " ".join(alert["annotations"].values())
        assert "drafthouse" in text
        assert "{{" not in text
        assert "error expanding" not in text


def test_the_same_numbers_from_two_scraped_addresses_count_once(
    tmp_path: Path,
) -> None:
    with (
        growing_endpoint() as target,
        running_prometheus(
            tmp_path, f'{target}", "{target.replace("127.0.0.1", "localhost")}', rules_yaml()
        ) as twice,
    ):
        twice.wait_for(f"count(rate({PREFIX}rounds_total[{WINDOW}])) == 2")
        (panel,) = (panel for panel in ALL_DASHBOARDS[0].panels if panel.title == "Target groups")
        assert twice.values(filled(panel.queries[0].expression)) == [2.0]
        assert twice.values(f"sum({PREFIX}coordinators)") == [4.0]
