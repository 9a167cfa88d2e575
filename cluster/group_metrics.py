"""What target groups have counted, in numbers that never fall while this ingress lives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from cluster.series import CLUSTER_SERIES, counted_from_zero, is_counter, of_each_group
from specdec.core.series import combine
from specdec.transport.base import PeerId


class GroupMetrics:
    """The target groups' snapshots, each the last that was heard.

    A group that is late with its answer, has a new engine, or is gone takes nothing away that it had counted:
    for Prometheus a counter that falls has begun anew, and all that is left of it has just happened. What is
    kept of a group that is gone is a few kilobytes.
    """

    def __init__(self) -> None:
        self._told: dict[PeerId, Mapping[str, float]] = {}
        self._of_former_engines: defaultdict[PeerId, dict[str, float]] = defaultdict(dict)

    def hear(self, snapshots: Mapping[PeerId, Mapping[str, float]]) -> None:
        """Take in answers, which must not be older than those before."""
        for group, snapshot in snapshots.items():
            former = self._of_former_engines[group]
            for series, value in self._told.get(group, {}).items():
                if is_counter(series) and snapshot.get(series, 0.0) < value:
                    former[series] = former.get(series, 0.0) + value
            self._told[group] = snapshot

    def has_heard(self, groups: Collection[PeerId]) -> bool:
        """Whether all of these groups have told something at some time."""
        return all(group in self._told for group in groups)

    def values(self, present: Collection[PeerId]) -> dict[str, float]:
        """Return one snapshot of all groups, and what is exported of each of those that are present."""
        there = {group: self._of(group) for group in self._told if group in present}
        gone = [
            {series: value for series, value in self._of(group).items() if is_counter(series)}
            for group in self._told
            if group not in present
        ]
        together = combine([*there.values(), *gone], CLUSTER_SERIES)
        return {**counted_from_zero(together), **of_each_group(there)}

    def _of(self, group: PeerId) -> dict[str, float]:
        values = dict(self._told[group])
        for series, value in self._of_former_engines[group].items():
            values[series] = values.get(series, 0.0) + value
        return values
