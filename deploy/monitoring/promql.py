"""PromQL over the series that are exported: a name that is not among them, or of another kind, is an error.

A scrape of any address of a cluster tells of all of it, and there may be several addresses (a proxy on every
node): series of one `job` that differ only in where they were scraped are one, whose largest value counts.
Where a job serves several models, those of engines and cluster have the label `model_name`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from cluster.series import CLUSTER_SERIES
from deploy.openai.metrics import DOOR_LABELS, MODEL_LABEL, PREFIX, DoorMetrics
from specdec.core.series import Combination

Kind = Literal["counter", "gauge", "histogram"]
JOB = "job"
"""Prometheus's label of what it scrapes: one job is one application, whatever runs in it."""


class _Exported(NamedTuple):
    """What is exported under a name."""

    labels: tuple[str, ...]
    combination: Combination
    is_of_model: bool
    """Whether each of several models has its own; others are the door's."""


@cache
def _door_kinds() -> dict[str, str]:
    return {metric.name.removeprefix(PREFIX): metric.type for metric in DoorMetrics().registry.collect()}


def _checked(name: str, kind: Kind) -> _Exported:
    """Return what is exported under this name, which has to be of this kind."""
    series = CLUSTER_SERIES.get(name)
    actual = _door_kinds().get(name) if series is None else series.kind
    if actual != kind:
        raise ValueError(f"{name} is not a {kind}: {'no such series' if actual is None else actual}")
    if series is None:
        return _Exported(DOOR_LABELS.get(name, ()), "sum", is_of_model=False)
    return _Exported(series.labels, series.combination, is_of_model=True)


def share(part: str, whole: str) -> str:
    """Return what one expression is of another; nothing where that is 0, rather than no number.

    A number that is none is drawn in red, and makes every mean over a time with it one.
    """
    return f"{part} / ({whole} > 0)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Which jobs expressions are about, and over which time they look.

    What its methods return has the labels `job` and `by`, so that two of them with the same `by` divide;
    with `tells_models` also `model_name`, where there are several and a metric is not the door's.
    Names are those of the catalogue, without prefix; `where` is further label matchers.
    """

    window: str
    """A duration, or Grafana's `$__rate_interval`."""
    matchers: str = ""
    """Of every selector; with rules, none."""
    model_matchers: str = ""
    """Of those selectors whose series there are of each model."""
    tells_models: bool = False
    """Whether several models stay apart; else they are taken together."""

    def gauge(self, name: str, *, by: Sequence[str] = (), where: str = "") -> str:
        """Return the value of a gauge, of those with more labels the sum."""
        exported = _checked(name, "gauge")
        return self._together(self._selector(PREFIX + name, where, exported), exported, by)

    def mean_gauge(self, name: str) -> str:
        """Return the value of a gauge, of several models the mean: of a share of time, or what is a ratio."""
        exported = _checked(name, "gauge")
        selector = self._selector(PREFIX + name, "", exported)
        return self._together(selector, exported._replace(combination="mean"), ())

    def lowest(self, name: str, *, where: str = "") -> str:
        """Return the least that a gauge was within the window, of those with more labels the sum."""
        exported = _checked(name, "gauge")
        selector = self._selector(PREFIX + name, where, exported)
        return self._together(f"min_over_time({selector}[{self.window}])", exported, ())

    def least(self, name: str) -> str:
        """Return the least that any scrape says of a gauge, of whatever labels: what is bad once is bad."""
        exported = _checked(name, "gauge")
        return f"min by ({JOB}) ({self._selector(PREFIX + name, '', exported)})"

    def rate(self, name: str, *, by: Sequence[str] = (), where: str = "") -> str:
        """Return by how much a counter grows per second, of those with more labels the sum."""
        return self._of_counter("rate", name, by, where)

    def increase(self, name: str, *, by: Sequence[str] = (), where: str = "") -> str:
        """Return by how much a counter has grown within the window."""
        return self._of_counter("increase", name, by, where)

    def ratio(self, part: str, whole: str, *, by: Sequence[str] = (), where: str = "") -> str:
        """Return by how much one counter grows for each one that another grows by; nothing at rest."""
        return share(self.rate(part, by=by, where=where), self.rate(whole, by=by, where=where))

    def quantile(self, quantile: float, name: str) -> str:
        """Return a quantile of what a histogram has seen within the window; nothing where it saw nothing."""
        return f"histogram_quantile({quantile:g}, {self._buckets(name)}) >= 0"  # of nothing it is no number

    def share_within(self, name: str, bound: str) -> str:
        """Return the share of what a histogram has seen within the window that was at most `bound`.

        There is none where it saw nothing.

        Args:
            name: of the histogram.
            bound: one of its bucket boundaries, as Prometheus writes it, or a Grafana variable.
        """
        exported = _checked(name, "histogram")
        within = self._selector(f"{PREFIX}{name}_bucket", f'le="{bound}"', exported)
        seen = self._selector(f"{PREFIX}{name}_count", "", exported)
        return share(
            f"max by ({JOB}) (rate({within}[{self.window}]))", f"max by ({JOB}) (rate({seen}[{self.window}]))"
        )

    def _buckets(self, name: str) -> str:
        """Return by how much the buckets of a histogram grow per second: of the ingresses, or the engines."""
        parts = f"{name}_bucket"
        exported = _checked(parts if parts in CLUSTER_SERIES else name, "histogram")
        selector = self._selector(PREFIX + parts, "", exported)
        if exported.is_of_model:
            return self._together(f"rate({selector}[{self.window}])", exported, ("le",))
        return f"max by ({JOB}, le) (rate({selector}[{self.window}]))"

    def _of_counter(self, function: str, name: str, by: Sequence[str], where: str) -> str:
        exported = _checked(name, "counter")
        selector = self._selector(f"{PREFIX}{name}_total", where, exported)
        return self._together(f"{function}({selector}[{self.window}])", exported, by)

    def _selector(self, metric: str, where: str, exported: _Exported) -> str:
        of_models = self.model_matchers if exported.is_of_model else ""
        matchers = ",".join(filter(None, (self.matchers, of_models, where)))
        return f"{metric}{{{matchers}}}" if matchers else metric

    def _together(self, expression: str, exported: _Exported, by: Sequence[str]) -> str:
        """Return one value for each of `by`, of what all scrapes and all labels say."""
        if unknown := set(by) - set(exported.labels):
            raise ValueError(f"no label {', '.join(sorted(unknown))} in {expression}")
        models = (MODEL_LABEL,) if exported.is_of_model else ()
        one_of_all_scrapes = f"max by ({', '.join((JOB, *models, *exported.labels))}) ({expression})"
        kept = (JOB, *(models if self.tells_models else ()), *by)
        if set(kept) == {JOB, *models, *exported.labels}:
            return one_of_all_scrapes
        is_mean = exported.combination == "mean" and set(by) == set(exported.labels)
        way = "avg" if is_mean else "sum"  # a mean over models; what there is for each label adds up
        return f"{way} by ({', '.join(kept)}) ({one_of_all_scrapes})"
