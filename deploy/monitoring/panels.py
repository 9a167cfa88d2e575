"""What a dashboard shows, without Grafana's JSON: `deploy.monitoring.grafana` writes that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from deploy.monitoring.promql import Scope
from deploy.openai.metrics import MODEL_LABEL

Unit = Literal["short", "s", "percentunit", "reqps", "tokens/s", "ops"]
"""`short` is a number; `ops` events per second."""

SHOWN = Scope(window="$__rate_interval", matchers='job=~"$job"', model_matchers=f'{MODEL_LABEL}=~"$model|"')
"""What the variables of a dashboard select, over Grafana's own window. Series of a job's only model do not
name it."""
SHOWN_AS_ONE = replace(SHOWN, window="$__range")
"""The same, over all of the time that is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One expression of a panel."""

    expression: str
    legend: str
    """Grafana replaces `{{label}}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where a number turns yellow, then red. With `bad` below `poor`, small numbers are the bad ones."""

    poor: float
    bad: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture or number."""

    title: str
    description: str
    """What it says, and when to worry, to somebody who has never read the code."""
    unit: Unit
    queries: tuple[Query, ...]
    kind: Literal["lines", "number"] = "lines"
    width: int = 8
    """Of 24 columns."""
    is_stacked: bool = False
    limits: Limits | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesVariable:
    """A choice among the values of a label."""

    name: str
    label: str
    query: str
    """Grafana's `label_values(SERIES, LABEL)`."""
    all_is_any: bool = True
    """Whether all stands for whatever there is; else for the values that `query` finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListVariable:
    """A choice among values that are known beforehand."""

    name: str
    label: str
    values: tuple[str, ...]
    default: str


Variable = SeriesVariable | ListVariable


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One page. Every dashboard has the variables `datasource`, `model` and `job`, too."""

    uid: str
    """What Grafana tells dashboards apart by; the file's name, too."""
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()

    @property
    def panels(self) -> tuple[Panel, ...]:
        """The panels of all rows."""
        return tuple(panel for row in self.rows for panel in row.panels)


def panel(
    title: str,
    description: str,
    unit: Unit,
    *queries: Query,
    kind: Literal["lines", "number"] = "lines",
    width: int = 8,
    is_stacked: bool = False,
    limits: Limits | None = None,
) -> Panel:
    """Return a panel; its parts are those of `Panel`."""
    return Panel(
        title=title,
        description=description,
        unit=unit,
        queries=queries,
        kind=kind,
        width=width,
        is_stacked=is_stacked,
        limits=limits,
    )


def line(expression: str, legend: str) -> Query:
    """Return a query with its legend."""
    return Query(expression=expression, legend=legend)
