"""PromQL over the series that are exported: a name that is not among them, or of another kind, is an error.

A scrape of any address of a cluster tells of all of it, and there may be several addresses (a proxy on every
node): series of one `job` that differ only in where they were scraped are one, whose largest value counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from cluster.series import CLUSTER_SERIES
from deploy.openai.metrics import DOOR_LABELS, PREFIX, DoorMetrics

Kind = Literal["counter", "gauge", "histogram"]
JOB = "job"
"""Prometheus's label of what it scrapes: one job is one application, whatever runs in it."""


@cache
def _door_kinds() -> dict[str, str]:
    return {metric.name.removeprefix(PREFIX): metric.type for metric in DoorMetrics().registry.collect()}


def _checked(name: str, kind: Kind) -> tuple[str, ...]:
    """Return the labels of a metric that is exported and of this kind."""
    series = CLUSTER_SERIES.get(name)
    actual = _door_kinds().get(name) if series is None else series.kind
    if actual != kind:
        raise ValueError(f"{name} is not a {kind}: {'no such series' if actual is None else actual}")
    return DOOR_LABELS.get(name, ()) if series is None else series.labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which jobs expressions are about, and over which time they look.

    What its methods return has the labels `job` and `by`, so that two of them with the same `by` divide.
    Names are those of the catalogue, without prefix; `where` is further label matchers.
    """

    window: str
    """A duration, or Grafana's `$__rate_interval`."""
    matchers: str = ""
    """Of every selector; with rules, none."""

    def gauge(self, name: str, *, by: Sequence[str] = (), where: str = "") -> str:
        """Return the value of a gauge, of those with more labels the sum."""
        labels = _checked(name, "gauge")
        return self._over_labels(self._selector(PREFIX + name, where), labels, by)

    def rate(self, name: str, *, by: Sequence[str] = (), where: str = "") -> str:
        """Return by how much a counter grows per second, of those with more labels the sum."""
        return self._of_counter("rate", name, by, where)

    def increase(self, name: str, *, by: Sequence[str] = (), where: str = "") -> str:
        """Return by how much a counter has grown within the window."""
        return self._of_counter("increase", name, by, where)

    def ratio(self, part: str, whole: str, *, by: Sequence[str] = ()) -> str:
        """Return by how much one counter grows for each one that another grows by."""
        return f"{self.rate(part, by=by)} / {self.rate(whole, by=by)}"

    def quantile(self, quantile: float, name: str) -> str:
        """Return a quantile of what a histogram has seen within the window."""
        _checked(name, "histogram")
        buckets = self._selector(f"{PREFIX}{name}_bucket", "")
        return f"histogram_quantile({quantile:g}, max by ({JOB}, le) (rate({buckets}[{self.window}])))"

    def share_within(self, name: str, bound: str) -> str:
        """Return the share of what a histogram has seen within the window that was at most `bound`.

        Args:
            name: of the histogram.
            bound: one of its bucket boundaries, as Prometheus writes it, or a Grafana variable.
        """
        _checked(name, "histogram")
        within = self._selector(f"{PREFIX}{name}_bucket", f'le="{bound}"')
        seen = self._selector(f"{PREFIX}{name}_count", "")
        return (
            f"max by ({JOB}) (rate({within}[{self.window}])) / max by ({JOB}) (rate({seen}[{self.window}]))"
        )

    def _of_counter(self, function: str, name: str, by: Sequence[str], where: str) -> str:
        labels = _checked(name, "counter")
        selector = self._selector(f"{PREFIX}{name}_total", where)
        return self._over_labels(f"{function}({selector}[{self.window}])", labels, by)

    def _selector(self, metric: str, where: str) -> str:
        matchers = ",".join(filter(None, (self.matchers, where)))
        return f"{metric}{{{matchers}}}" if matchers else metric

    @staticmethod
    def _over_labels(expression: str, labels: Sequence[str], by: Sequence[str]) -> str:
        if unknown := set(by) - set(labels):
            raise ValueError(f"no label {', '.join(sorted(unknown))} in {expression}")
        one_of_all_scrapes = f"max by ({', '.join((JOB, *labels))}) ({expression})"
        if set(by) == set(labels):
            return one_of_all_scrapes
        return f"sum by ({', '.join((JOB, *by))}) ({one_of_all_scrapes})"
