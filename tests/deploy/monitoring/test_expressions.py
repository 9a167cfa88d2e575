"""Every expression of every dashboard, rule and alert refers to what is exported; a typing error does not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.series import CLUSTER_SERIES
from deploy.monitoring.dashboards import ALL_DASHBOARDS
from deploy.monitoring.panels import SHOWN, SeriesVariable
from deploy.monitoring.promql import PREFIX, Scope
from deploy.monitoring.rule import Recording
from deploy.monitoring.rules import rule_groups
from tests.deploy.monitoring.exposition import exported_labels, exposition
from tests.deploy.monitoring.expressions import filled, mistakes, references
from tests.deploy.monitoring.prometheus import needs_promtool, run_scenarios

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
    assert SHOWN.mean_gauge("draft_utilization") == (
        f"avg by (job) (max by (job, model_name) (ray_drafthouse_draft_utilization{chosen}))"
    )
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


def queries_of_scalers() -> list[str]:
    """What the documentation has KEDA ask Prometheus."""
    (scaled,) = blocks_of_scalers("apiVersion: keda")
    return [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]


def blocks_of_scalers(beginning: str) -> list[Any]:
    page = (Path(__file__).resolve().parents[3] / "docs" / "operations" / "sizing.md").read_text()
    return [yaml.safe_load(block) for block in re.findall(rf"```yaml\n({beginning}.*?)```", page, re.DOTALL)]


def test_hpa_asks_for_the_same_as_keda() -> None:
    (adapter,) = blocks_of_scalers("rules:\n  external")
    (scaler,) = blocks_of_scalers("apiVersion: autoscaling/v2")
    (rule,) = adapter["rules"]["external"]
    assert rule["metricsQuery"] == queries_of_scalers()[0]
    assert references(rule["seriesQuery"]).labels_by_metric.keys() <= EXPORTED.keys()
    (metric,) = scaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]


def test_what_the_documentation_has_other_scalers_ask_for_is_exported() -> None:
    queries = queries_of_scalers()
    assert len(queries) == 2
    for query in queries:
        asked = references(query).labels_by_metric
        assert asked.keys() <= EXPORTED.keys()
        assert all(labels == {"job"} for labels in asked.values()), "of one cluster"


@needs_promtool
@pytest.mark.parametrize(
    ("values", "wanted", "wait_s"),
    [
        pytest.param((70, 40, 0, 2), 1, 1.5, id="one group more"),
        pytest.param((70, 20, 0, 2), 0, 1.5, id="enough"),
        pytest.param((None, None, 3, 0), 1, None, id="no group, and somebody waits"),
        pytest.param((None, None, 0, 0), 0, None, id="no group, and nobody waits"),
    ],
)
def test_other_scalers_get_the_same_number_however_many_addresses_are_scraped(
    tmp_path: Path, values: tuple[int | None, ...], wanted: int, wait_s: float | None
) -> None:
    """Of 64 places for each group 0.8 are to be taken. Other jobs are other clusters."""
    groups, queue = queries_of_scalers()
    (job,) = set(re.findall(r'job="([^"]*)"', groups + queue))
    names = ("num_requests_running", "num_requests_waiting", "num_requests_without_group", "coordinators")
    scraped = dict(zip(names, values, strict=True)) | {"queue_wait_seconds": wait_s}
    history = [
        {"series": f'{PREFIX}{name}{{job="{one}",instance="{instance}"}}', "values": f"{value * times}x5"}
        for name, value in scraped.items()
        if value is not None
        for one, times in ((job, 1), ("another/cluster", 9))
        for instance in ("10.0.0.1:8000", "10.0.0.2:8000")
    ]
    samples = ((groups, wanted), *([] if wait_s is None else [(queue, wait_s)]))
    expected = [
        {"expr": query, "eval_time": "5m", "exp_samples": [{"labels": f'{{job="{job}"}}', "value": value}]}
        for query, value in samples
    ]
    test = {"interval": "1m", "input_series": history, "promql_expr_test": expected}
    run_scenarios(tmp_path, [test])


def not_a_number(expression: str) -> str:
    """Return an expression that has a value for each that is NaN, which nothing equals."""
    return f"({expression}) != ({expression})"


@needs_promtool
def test_at_rest_nothing_is_shown_or_stored_that_is_no_number(tmp_path: Path) -> None:
    """A night in which nobody asks for anything: no counter grows. Grafana draws NaN in red."""
    history = [
        {"series": f"{name}{{{','.join(labels)}}}", "values": f"{value:g}x30"}
        for name, labels, value in at_rest()
    ]
    expressions = [query.values[0].expression for query in QUERIES]
    expressions += [rule.expression for rule in RULES if isinstance(rule, Recording)]
    tests = [{"expr": not_a_number(filled(one)), "eval_time": "30m"} for one in expressions]
    # That such values are found: of nothing at all they are a part, and a quantile.
    rate, buckets = (f"rate({PREFIX}{name}[5m])" for name in ("rounds_total", "round_draft_seconds_bucket"))
    found = [f"{rate} / {rate}", f"histogram_quantile(0.5, {buckets})"]
    tests += [
        {
            "expr": f"count({not_a_number(one)})",
            "eval_time": "30m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for one in found
    ]
    run_scenarios(tmp_path, [{"interval": "1m", "input_series": history, "promql_expr_test": tests}])


def at_rest() -> Iterator[tuple[str, list[str], float]]:
    """Yield every series with its labels and value."""
    for family in text_string_to_metric_families(exposition(7).decode()):
        for sample in family.samples:
            labels = {"job": "drafthouse", **sample.labels}
            yield sample.name, [f'{name}="{value}"' for name, value in labels.items()], sample.value


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
