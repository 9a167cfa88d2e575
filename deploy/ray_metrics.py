"""Publishes what /metrics says through Ray's metrics API, too: for those who scrape Ray."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from ray.util.metrics import Gauge

from cluster.series import CLUSTER_SERIES
from deploy.openai.metrics import PREFIX, parsed
from specdec.core.series import name_of

_RAYS_PREFIX = "ray_"
"""Ray puts it before every name."""


class Publishes(Protocol):
    """One of Ray's metrics."""

    def set(self, value: float, tags: dict[str, str]) -> None:
        """Say how it is now."""
        ...


def _made_by_ray(name: str, text: str, labels: tuple[str, ...]) -> Publishes:
    gauge: Publishes = Gauge(name, text, labels)
    return gauge


class RaySink:
    """Takes snapshots; what it publishes has the names, labels and values that /metrics has.

    Every sample is a gauge to Ray, counters and the parts of histograms as well: Ray's own counters are of a
    process and take differences, these are sums over processes, and are 0 before anything was counted.

    A gauge of Ray's says for ever what it was told last, of every set of labels: what is not in a snapshot
    any more has to be told off. Numbers of things that are there become 0. All others become no number: a
    counter that fell to 0, and is told of again, would have grown by all of itself.
    """

    def __init__(self, make: Callable[[str, str, tuple[str, ...]], Publishes] = _made_by_ray) -> None:
        self._make = make
        self._metrics: dict[str, tuple[Publishes, tuple[str, ...]]] = {}
        """With the names of their labels, which are the same for good: of workers of another version than
        this process, keys may have fewer or more."""
        self._published: frozenset[str] = frozenset()

    def publish(self, snapshot: Mapping[str, float]) -> None:
        """Publish values by the keys of `deploy.openai.metrics.render`, and these alone."""
        gone = {series: _without(series) for series in self._published - snapshot.keys()}
        self._published = frozenset(snapshot)
        for series, value in (*gone.items(), *snapshot.items()):
            name, labels = parsed(series)
            if name not in self._metrics:
                known = CLUSTER_SERIES.get(name)
                suffix = "_total" if known is not None and known.kind == "counter" else ""
                text = "Of the ingresses." if known is None else known.help
                full_name = PREFIX.removeprefix(_RAYS_PREFIX) + name + suffix
                names = tuple(dict.fromkeys((*labels, *(() if known is None else known.labels))))
                self._metrics[name] = self._make(full_name, text, names), names
            metric, names = self._metrics[name]
            metric.set(float(value), {one: labels.get(one, "") for one in names})

    def withdraw(self) -> None:
        """Publish nothing any more, until the next snapshot: another process does."""
        self.publish({})


def _without(series: str) -> float:
    known = CLUSTER_SERIES.get(name_of(series))
    is_number_of_things = known is not None and known.kind == "gauge" and known.combination == "sum"
    return 0.0 if is_number_of_things else math.nan
