"""What target groups have counted, in numbers that never fall while this ingress lives."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping

from cluster.series import CLUSTER_SERIES, counted_from_zero, is_counter, of_each_group
from specdec.core.series import combine
from specdec.transport.base import PeerId

_MOST_APART = 32
"""Of groups that are gone: those that went last may only be cut off, and come back."""
_MOST_NAMES = 10_000
"""Of groups that are gone and kept as one: so many are known by name, should one come back all the same."""


class GroupMetrics:
    """The target groups' snapshots, each the last that was heard.

    A group that is late with its answer, has a new engine, or is gone takes nothing away that it had counted:
    for Prometheus a counter that falls has begun anew, and all that is left of it has just happened. Of the
    groups that are gone those that went last are kept apart, a few kilobytes each, and all others as one.
    """

    def __init__(self) -> None:
        self._told: dict[PeerId, Mapping[str, float]] = {}
        self._of_former_engines: defaultdict[PeerId, dict[str, float]] = defaultdict(dict)
        self._gone: dict[PeerId, None] = {}
        """Of those that have told, who is not there any more, in the order in which they were missed."""
        self._as_one: Mapping[str, float] = {}
        """What those have counted that are kept as one."""
        self._names: deque[PeerId] = deque(maxlen=_MOST_NAMES)
        """Whose that is, and who else is in sums that were told."""
        self._of_gone: Mapping[str, float] | None = None
        """What all have counted that are gone; None: it has to be added up anew."""

    def hear(self, snapshots: Mapping[PeerId, Mapping[str, float]]) -> None:
        """Take in answers, which must not be older than those before."""
        for group, snapshot in snapshots.items():
            former = self._of_former_engines[group]
            if group not in self._told and group in self._names:
                # It is in a sum already, nobody knows with how much: what it counts from now on is new.
                self._names.remove(group)
                former.update((series, -value) for series, value in _counters(snapshot).items())
            for series, value in self._told.get(group, {}).items():
                if is_counter(series) and snapshot.get(series, 0.0) < value:
                    former[series] = former.get(series, 0.0) + value
            self._told[group] = snapshot
            if group in self._gone:
                self._of_gone = None

    def count_as_told(self, groups: Iterable[PeerId]) -> None:
        """What groups that have not been heard here have counted is in sums that others had told: of those
        that are heard after all counts what they count from then on.
        """
        self._names.extend(group for group in groups if group not in self._told and group not in self._names)

    def has_heard(self, groups: Collection[PeerId]) -> bool:
        """Whether all of these groups have told something at some time."""
        return all(group in self._told for group in groups)

    def values(self, present: Collection[PeerId]) -> dict[str, float]:
        """Return one snapshot of all groups, and what is exported of each of those that are present."""
        self._note_present(present)
        there = {group: self._of(group) for group in self._told if group not in self._gone}
        together = combine([*there.values(), self._counted_by_gone()], CLUSTER_SERIES)
        return {**counted_from_zero(together), **of_each_group(there)}

    def _note_present(self, present: Collection[PeerId]) -> None:
        gone = [group for group in self._gone if group not in present]
        gone += [group for group in self._told if group not in present and group not in self._gone]
        if gone == list(self._gone):
            return
        self._of_gone = None
        num_more = max(0, len(gone) - _MOST_APART)
        for group in gone[:num_more]:
            self._as_one = combine([self._as_one, _counters(self._of(group))], CLUSTER_SERIES)
            self._names.append(group)
            del self._told[group], self._of_former_engines[group]
        self._gone = dict.fromkeys(gone[num_more:])

    def _counted_by_gone(self) -> Mapping[str, float]:
        if self._of_gone is None:
            apart = [_counters(self._of(group)) for group in self._gone]
            self._of_gone = combine([self._as_one, *apart], CLUSTER_SERIES)
        return self._of_gone

    def _of(self, group: PeerId) -> dict[str, float]:
        values = dict(self._told[group])
        for series, value in self._of_former_engines[group].items():
            values[series] = values.get(series, 0.0) + value
        return values


def _counters(values: Mapping[str, float]) -> dict[str, float]:
    return {series: value for series, value in values.items() if is_counter(series)}
