"""What all doors of a deployment have counted, as one account that one of them keeps.

A scrape is answered by whichever door it reaches. If each told what it has counted itself, numbers would
jump from one scrape to the next, and for Prometheus a counter that falls has begun anew. So the doors report
to one of them, the keeper, which adds up what they and the target groups have counted and tells the others:
whoever is asked, the answer is the same, a moment old at most.

The keeper is the door that has been there longest; while an update replaces doors and target groups by
others of a new generation, it is one of these, as soon as one of their groups is there: a door hears the
groups of its own generation alone. A keeper counts on from what it was told last by the one before.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping

from cluster.directory import Member
from cluster.series import is_counter, is_of_one_group
from specdec.transport.base import PeerId
from specdec.transport.messages import DoorReport, DoorTotals

_MOST_WAITS = 5
"""So often a new keeper tells what it was told last, while somebody has not reported to it yet."""
_MOST_GONE = 32
"""Doors that are gone, of which what they counted is kept apart: one that was only thought to be may be heard
again."""
_KEY = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(\{.*\})?")


def is_sound(message: DoorReport | DoorTotals) -> bool:
    """Whether it has numbers of series and nothing else: what is told is told on, and added up for good."""
    counters = [message.counters, *([message.told] if isinstance(message, DoorReport) else [])]
    all_values = (*counters, message.gauges)
    is_named = all(_is_number_of_series(key, value) for values in all_values for key, value in values.items())
    return is_named and all(value >= 0.0 for values in counters for value in values.values())


def sound_part(values: Mapping[str, float]) -> dict[str, float]:
    """Return what are numbers of series: one that is not finite would make all that it is added to so."""
    return {key: value for key, value in values.items() if _is_number_of_series(key, value)}


def _is_number_of_series(key: str, value: float) -> bool:
    return _KEY.fullmatch(key) is not None and math.isfinite(value)


class SharedMetrics:
    """The account as one door sees it: it keeps it, or is told."""

    def __init__(self, me: PeerId, since: float, generation: str = "") -> None:
        """`since`: when this door was ready, as `Member.since` says it; `generation` as `Member` has it."""
        self._me = me
        self._since = since
        self._generation = generation
        self._doors: tuple[PeerId, ...] = (me,)
        self._has_seen_doors = False
        self._reports: dict[PeerId, DoorReport] = {}
        """The last of each door, also of some that are gone: a few kilobytes each."""
        self._told: DoorTotals | None = None
        self._told_by: PeerId | None = None
        self._carried: dict[str, float] = {}
        """Counted by those whom only former keepers have heard, and by those that have been gone for long."""
        self._num_waits = 0
        self.num_taken_over = 0
        """How often this door has gone on from what another one had told: of groups, too, that it has not
        heard itself."""

    @property
    def keeper(self) -> PeerId:
        """Who keeps the account."""
        return self._doors[0]

    @property
    def keeps(self) -> bool:
        """Whether this door does."""
        return self.keeper == self._me

    @property
    def listeners(self) -> tuple[PeerId, ...]:
        """Doors that are there and have reported to this one."""
        return tuple(door for door in self._doors if door != self._me and door in self._reports)

    @property
    def is_waiting(self) -> bool:
        """Whether it has become the keeper, and others have not reported to it yet."""
        return self._num_waits > 0

    @property
    def told(self) -> DoorTotals | None:
        """What the account said last; None: this door has not heard."""
        return self._told

    def set_doors(self, doors: Iterable[Member], with_groups: Collection[str] = ()) -> None:
        """Take in who is there; this door is, whatever the directory says.

        `with_groups`: generations of which there are target groups.
        """
        others = {(door.since, door.peer_id): door.generation for door in doors if door.peer_id != self._me}
        # Who finds others there is not the first, though its clock may say so: one of them kept the account.
        did_keep = self.keeps and (self._has_seen_doors or not others)
        self._has_seen_doors = True
        self._doors = _in_turn({**others, (self._since, self._me): self._generation}, with_groups)
        if self.keeps and not did_keep:
            self._num_waits = _MOST_WAITS

    def report(self, own: DoorReport) -> DoorReport:
        """Return what to tell the keeper, of what this door has counted.

        A new one hears what the one before has said last: that it may have said to this door alone.
        """
        if self._told is None or self._told_by == self.keeper:
            return own
        return DoorReport(own.counters, own.gauges, self._told.counters)

    def hear(self, sender: PeerId, message: DoorReport | DoorTotals) -> None:
        """Take in what another door says. Totals count if they are the keeper's."""
        if isinstance(message, DoorReport):
            self._reports[sender] = message
            if message.told and self._num_waits:
                before = DoorTotals({}, {}) if self._told is None else self._told
                most = {
                    name: max(counters.get(name, 0.0) for counters in (before.counters, message.told))
                    for name in before.counters.keys() | message.told.keys()
                }
                self._told = DoorTotals(most, before.gauges)
        elif sender == self.keeper:
            self._told, self._told_by = message, sender

    def add_up(
        self,
        own: DoorReport,
        of_groups: Mapping[str, float],
        *,
        is_complete: bool,
        is_regular: bool = True,
    ) -> DoorTotals | None:
        """Return what all have counted, None while nobody can tell; only the keeper does that.

        Args:
            own: what this door has counted.
            of_groups: what target groups have counted, and how they are.
            is_complete: whether all of them that are there have told.
            is_regular: whether it is done once per report of the others; so often are they waited for,
                however often somebody asks meanwhile.
        """
        self._reports[self._me] = own
        self._fold_gone()
        totals = self._sum(of_groups)
        if self._num_waits:
            self._num_waits -= is_regular
            is_complete = is_complete and all(door in self._reports for door in self._doors)
            if not is_complete and self._num_waits:
                return self._told
            self._num_waits = 0
            if self._told is not None:
                self.num_taken_over += 1
                self._carry(self._told.counters, totals.counters)
                totals = self._sum(of_groups)
        if self._told is not None:
            totals = DoorTotals(_not_below(totals.counters, self._told.counters), totals.gauges)
        self._told, self._told_by = totals, self._me
        return totals

    def _fold_gone(self) -> None:
        """Keep of those that have been gone for longest their sum alone."""
        gone = [door for door in self._reports if door not in self._doors]
        for door in gone[: max(0, len(gone) - _MOST_GONE)]:
            _add(self._carried, self._reports.pop(door).counters)

    def _sum(self, of_groups: Mapping[str, float]) -> DoorTotals:
        counters = {name: value for name, value in of_groups.items() if is_counter(name)}
        gauges = {name: value for name, value in of_groups.items() if name not in counters}
        for counted in (*(report.counters for report in self._reports.values()), self._carried):
            _add(counters, counted)
        for door in self._doors:
            if door in self._reports:
                _add(gauges, self._reports[door].gauges)
        return DoorTotals(counters, gauges)

    def _carry(self, told: Mapping[str, float], present: Mapping[str, float]) -> None:
        """Keep what has been told and cannot be heard any more."""
        gone = {name: value - present.get(name, 0.0) for name, value in told.items()}
        # A group that is gone is not told of any more; what it has counted is in the sums.
        _add(
            self._carried,
            {
                name: value
                for name, value in gone.items()
                if value > 0 and (name in present or not is_of_one_group(name))
            },
        )


def _in_turn(doors: Mapping[tuple[float, PeerId], str], with_groups: Collection[str]) -> tuple[PeerId, ...]:
    """Return doors in the order in which they keep the account, by when they were ready, and generation."""
    began_s = {
        generation: min(since for (since, _), its in doors.items() if its == generation)
        for generation in doors.values()
    }
    return tuple(
        peer_id
        for _, _, _, peer_id in sorted(
            (generation not in with_groups, -began_s[generation], since, peer_id)
            for (since, peer_id), generation in doors.items()
        )
    )


def _not_below(sums: Mapping[str, float], told: Mapping[str, float]) -> dict[str, float]:
    """Return sums, of which none is less than what was told of it because of how it is rounded.

    The same numbers, added up in another order, may differ in their last bits, and for Prometheus a counter
    that falls by one has begun anew.
    """
    return {
        name: max(value, told[name]) if name in told and math.isclose(value, told[name]) else value
        for name, value in sums.items()
    }


def _add(sums: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value
