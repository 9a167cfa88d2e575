"""Every expression of every dashboard, rule and alert refers to what is exported; a typing error does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from cluster.series import CLUSTER_SERIES
from deploy.monitoring.dashboards import ALL_DASHBOARDS
from deploy.monitoring.panels import SHOWN, SeriesVariable
from deploy.monitoring.promql import PREFIX, Scope
from deploy.monitoring.rule import Recording
from deploy.monitoring.rules import rule_groups
from tests.deploy.monitoring.exposition import exported_labels
from tests.deploy.monitoring.expressions import filled, mistakes, references

EXPORTED = exported_labels()
RULES = [rule for group in rule_groups() for rule in group.rules]
KNOWN = {**EXPORTED, **{rule.name: frozenset[str]() for rule in RULES if isinstance(rule, Recording)}}
QUERIES = [
    pytest.param(query, id=f"{page.uid}-{panel.title}-{query.legend}")
    for page in ALL_DASHBOARDS
    for panel in page.panels
    for query in panel.queries
]
TYPING_ERRORS = (
    (f"{PREFIX}rounds_total", f"{PREFIX}round_total"),
    (f"{PREFIX}rounds_total", f"{PREFIX}rounds"),
    (f"{PREFIX}rounds_total", "drafthouse_rounds_total"),
    ('mode="x"', 'modus="x"'),
    ("by (job, mode)", "by (job, modus)"),
)


@pytest.mark.parametrize("query", QUERIES)
def test_a_panel_shows_what_is_exported(query) -> None:
    assert not list(mistakes(filled(query.expression), KNOWN, query.legend))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_compares_what_is_exported(rule) -> None:
    assert not list(mistakes(rule.expression, KNOWN))


@pytest.mark.parametrize(("right", "wrong"), TYPING_ERRORS)
def test_a_typing_error_is_found(right: str, wrong: str) -> None:
    expression = (
        f'max by (job, mode) (rate({PREFIX}overlap_rounds_total{{mode="x"}}[5m]) / {PREFIX}rounds_total)'
    )
    assert not list(mistakes(expression, KNOWN, "{{mode}}"))
    assert list(mistakes(expression.replace(right, wrong), KNOWN, "{{mode}}"))
    assert list(mistakes(expression, KNOWN, "{{position}}"))


def test_code_cannot_name_what_is_not_exported() -> None:
    scope = Scope(window="5m")
    for mistake in (
        lambda: scope.rate("round"),
        lambda: scope.rate("num_requests_running"),
        lambda: scope.gauge("rounds"),
        lambda: scope.quantile(0.5, "rounds"),
        lambda: scope.share_within("http_requests", "2.5"),
        lambda: scope.rate("rounds", by=("mode",)),
    ):
        with pytest.raises(ValueError, match=r"not a|no label"):
            mistake()


def test_a_series_with_labels_is_added_up_after_the_scrapes_have_become_one() -> None:
    assert Scope(window="5m").rate("http_requests", by=("status",)) == (
        "sum by (job, status) (max by (job, route, status) (rate(ray_drafthouse_http_requests_total[5m])))"
    )


def test_models_are_added_up_on_dashboards_and_stay_apart_in_alerts() -> None:
    chosen = '{job=~"$job",model_name=~"$model|"}'
    assert SHOWN.gauge("coordinators") == (
        f"sum by (job) (max by (job, model_name) (ray_drafthouse_coordinators{chosen}))"
    )
    assert SHOWN.gauge("kv_cache_usage_perc") == (
        f"avg by (job) (max by (job, model_name) (ray_drafthouse_kv_cache_usage_perc{chosen}))"
    )
    assert "model_name" not in SHOWN.rate("http_requests")
    apart = Scope(window="5m", tells_models=True)
    assert apart.gauge("coordinators") == "max by (job, model_name) (ray_drafthouse_coordinators)"
    assert apart.rate("overlap_rounds") == (
        "sum by (job, model_name) (max by (job, model_name, mode) "
        "(rate(ray_drafthouse_overlap_rounds_total[5m])))"
    )


def test_variables_ask_for_what_is_exported() -> None:
    for page in ALL_DASHBOARDS:
        for variable in page.variables:
            if isinstance(variable, SeriesVariable):
                asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable.query)
                assert asked is not None
                assert not list(mistakes(filled(asked[1]), KNOWN))
                (metric,) = references(filled(asked[1])).labels_by_metric
                assert asked[2] in EXPORTED[metric]


def test_what_the_documentation_has_other_scalers_ask_for_is_exported() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text()
    objects = [
        yaml.safe_load(block) for block in re.findall(r"```yaml\n(apiVersion: keda.*?)```", page, re.DOTALL)
    ]
    queries = [trigger["metadata"]["query"] for scaled in objects for trigger in scaled["spec"]["triggers"]]
    assert len(queries) == 2
    for query in queries:
        asked = references(query).labels_by_metric
        assert asked.keys() <= EXPORTED.keys()
        assert all(EXPORTED[metric] >= labels for metric, labels in asked.items())


def test_every_series_is_on_some_page_or_left_out_for_a_reason() -> None:
    shown = {
        metric.removeprefix(PREFIX).removesuffix("_total")
        for page in ALL_DASHBOARDS
        for panel in page.panels
        for query in panel.queries
        for metric in references(filled(query.expression)).labels_by_metric
    }
    # Of a histogram the buckets are shown; what is left of it is for means.
    assert {
        name for name in CLUSTER_SERIES.keys() - shown if CLUSTER_SERIES[name].kind != "histogram"
    } == set()
    assert {name for name in CLUSTER_SERIES if name.endswith("_bucket")} <= shown
