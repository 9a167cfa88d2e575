"""What PromQL expressions refer to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

promql_parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed")

WINDOWS = ("$__rate_interval", "$__range")
_GRAFANA_VALUES = {"$job": ".*", "$model": ".*", "$target_group": ".*", "$ttft": "2.5", "$itl": "0.5"}


@dataclass(frozen=True, slots=True)
class References:
    """Names in one expression."""

    labels_by_metric: dict[str, set[str]] = field(default_factory=dict)
    """Labels that each metric's selectors ask for."""
    groupings: set[str] = field(default_factory=set)
    """Labels of by clauses."""


def filled(expression: str, window: str = "5m") -> str:
    """Return a panel's expression with values for Grafana's variables."""
    text = expression
    for of_grafana in WINDOWS:
        text = text.replace(of_grafana, window)
    for name, value in _GRAFANA_VALUES.items():
        text = text.replace(name, value)
    assert "$" not in text, f"a variable that no dashboard has: {text}"
    return text


def references(expression: str) -> References:
    """Return what an expression (without Grafana's variables) refers to."""
    found = References()

    def visit(node: object) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            labels = found.labels_by_metric.setdefault(node.name, set())
            labels.update(matcher.name for matcher in node.matchers.matchers)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.groupings.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def mistakes(expression: str, known: Mapping[str, frozenset[str]], legend: str = "") -> Iterator[str]:
    """Yield what is wrong with an expression.

    Args:
        expression: without Grafana's variables.
        known: labels by metric name; Prometheus adds `job` to all, a door of several models `model_name`.
        legend: of a panel, with `{{label}}`.
    """
    refers_to = references(expression)
    if not refers_to.labels_by_metric:
        yield "refers to no metric"
    everywhere = {"job", "model_name"}
    available = set(everywhere)
    for metric, asked in refers_to.labels_by_metric.items():
        if metric not in known:
            yield f"no metric {metric}"
            continue
        available |= known[metric]
        yield from (f"{metric} has no label {label}" for label in sorted(asked - known[metric] - everywhere))
    yield from (f"grouped by {label}, which nothing has" for label in sorted(refers_to.groupings - available))
    shown = set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))
    yield from (
        f"the legend shows {label}, which is not kept" for label in sorted(shown - refers_to.groupings)
    )
