"""What an exported number is: its kind, its meaning, and how those of several engines become one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

SeriesKind = Literal["counter", "gauge", "histogram"]
"""counter: grows from the start on; gauge: how it is now; histogram: a part of one (NAME_bucket, NAME_sum or
NAME_count), which grows as well."""
Combination = Literal["sum", "mean", "max"]
"""How the values of several engines become one."""
_ENDS_A_LABEL = str.maketrans('"\\\n', "___")


class Series(NamedTuple):
    """One metric, whatever its labels."""

    kind: SeriesKind
    help: str
    """One sentence for whoever reads the metric."""
    combination: Combination = "sum"
    labels: tuple[str, ...] = ()
    """Names of its labels, in the order in which they are exported."""


def name_of(series: str) -> str:
    """Return the metric's name of a key like `rounds{mode="lockstep"}`."""
    return series.partition("{")[0]


def as_label(text: str) -> str:
    """Return a text as the value of a label in such a key: without what would end it."""
    return text.translate(_ENDS_A_LABEL)


def combine(snapshots: Iterable[Mapping[str, float]], known: Mapping[str, Series]) -> dict[str, float]:
    """Return one snapshot for several engines. A mean is that of the engines that have the value.

    Args:
        snapshots: values by metric name, with labels where there are any.
        known: metrics by name; values of others are added.
    """
    values: defaultdict[str, list[float]] = defaultdict(list)
    for snapshot in snapshots:
        for series, value in snapshot.items():
            values[series].append(value)
    return {series: _combined(its, known.get(name_of(series))) for series, its in values.items()}


def _combined(values: list[float], series: Series | None) -> float:
    combination = "sum" if series is None else series.combination
    if combination == "max":
        return max(values)
    return sum(values) / (len(values) if combination == "mean" else 1)
