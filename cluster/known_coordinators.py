"""The coordinators that a door may send requests to: by the directory, by what they say, by their silence.

Bookkeeping without messages; `stream_book` speaks with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from cluster.directory import Member
from cluster.standstill import ORDINARY_PAUSE_S, Standstill
from specdec.core.clock import Clock
from specdec.core.description import TargetDescription
from specdec.transport.base import PeerId
from specdec.transport.messages import Pong

_DIRECTORY_LEASES = 2
"""So long after its last answer, in leases, what the directory said still tells who may be there."""
_CUT_OFF_LEASES = 10
"""Who hears none of those that are in the directory for so long, in leases, is cut off from them."""


@dataclass(slots=True)
class KnownCoordinator:
    """One coordinator, as a door knows it."""

    member: Member
    heard_s: float
    is_reachable: bool = True
    is_draining: bool = False
    is_closing: bool = False
    """Whether it has said that the whole deployment ends."""
    has_target: bool = True
    """False: its target was lost, and the next one is being loaded. What it is sent waits for that."""
    reported_load: int = 0
    description: TargetDescription | None = None

    @property
    def peer_id(self) -> PeerId:
        """Its id."""
        return self.member.peer_id

    @property
    def takes_requests(self) -> bool:
        """Whether it can be reached, and has not said that it goes."""
        return self.is_reachable and not self.is_draining


class KnownCoordinators:
    """All that are in the directory, and whether to wait for others where none takes requests.

    For a lease's time after the last one was lost, or said that it goes, and as long as one that says nothing
    is in the directory, requests are not refused: it may only have been late, and who goes leaves requests to
    another, of which this door may not have heard yet. A directory that does not answer vouches for nobody,
    and one that vouches for those whom this door does not hear for long has no answer for its clients: others
    may hear them.
    """

    def __init__(self, clock: Clock, *, lease_s: float, may_be_none: bool) -> None:
        """`may_be_none`: one is started for requests that wait, however long nobody was there."""
        self._clock = clock
        self._lease_s = lease_s
        self._may_be_none = may_be_none
        self._known: dict[PeerId, KnownCoordinator] = {}
        self._standstill = Standstill(ordinary_s=ORDINARY_PAUSE_S)
        self._last_description: TargetDescription | None = None
        self.is_closing = False
        """Whether the whole deployment ends: all that are there say so, or the last that were did. One alone
        may be wrong: Serve does not always say why it ends a replica."""
        self.doubtful_until_s = -math.inf
        """Until then, somebody may turn out to be there."""
        self.directory_heard_s = clock.now_s()
        """When the directory last said who is there, or that nothing has changed."""

    def __iter__(self) -> Iterator[KnownCoordinator]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def get(self, peer_id: PeerId | None) -> KnownCoordinator | None:
        """Return one; None if it is not there."""
        return None if peer_id is None else self._known.get(peer_id)

    @property
    def is_in_doubt(self) -> bool:
        """Whether somebody may yet turn out to be there.

        Who is silent but says to the directory that it is there is late, not lost: on a machine that starts
        other processes, say. One that is lost or hangs says nothing there either, and is soon not in it; that
        is not heard while the directory cannot be reached.
        """
        now_s = self._clock.now_s()
        if now_s < self.doubtful_until_s:
            return True
        if now_s - self.directory_heard_s > _DIRECTORY_LEASES * self._lease_s:
            return False
        return any(not one.is_reachable and not one.is_draining for one in self)

    @property
    def may_wait(self) -> bool:
        """Whether new requests wait where nobody takes them."""
        return (self._may_be_none or self.is_in_doubt) and not (self.is_closing or self.is_cut_off)

    @property
    def is_cut_off(self) -> bool:
        """Whether some are there, and none of them has been heard for long."""
        if not self._known or any(one.is_reachable for one in self):
            return False
        heard_s = max(one.heard_s for one in self)
        return self._clock.now_s() - heard_s > _CUT_OFF_LEASES * self._lease_s

    @property
    def takers(self) -> list[KnownCoordinator]:
        """Those that take requests."""
        return [coordinator for coordinator in self if coordinator.takes_requests]

    @property
    def num_serving(self) -> int:
        """How many can be reached and have a target."""
        return sum(one.is_reachable and one.has_target for one in self)

    @property
    def description(self) -> TargetDescription | None:
        """Facts about the target of those that take requests, or will; None where nobody does or is known."""
        takers = self.takers
        for coordinator in takers:
            if coordinator.description is not None:
                return coordinator.description
        # A successor that has not introduced itself yet serves what the one before did.
        return self._last_description if takers or self.may_wait else None

    def replace(self, members: Iterable[Member]) -> tuple[list[PeerId], list[PeerId]]:
        """Know exactly these members; return who is gone and who is new."""
        present = {member.peer_id: member for member in members}
        gone = [peer_id for peer_id in self._known if peer_id not in present]
        new = [peer_id for peer_id in present if peer_id not in self._known]
        for peer_id in gone:
            self._doubt(self._known.pop(peer_id))
        now_s = self._clock.now_s()
        for peer_id in new:
            self._known[peer_id] = KnownCoordinator(present[peer_id], now_s)
        self._settle_closing()
        return gone, new

    def hear(self, coordinator: KnownCoordinator) -> bool:
        """Note that it has said something; return whether it was taken for lost."""
        now_s = self._clock.now_s()
        self._forgive_standstill(now_s)
        coordinator.heard_s = now_s
        was_reachable, coordinator.is_reachable = coordinator.is_reachable, True
        return not was_reachable

    def welcome(self, coordinator: KnownCoordinator, description: TargetDescription | None) -> None:
        """Note how it introduces itself; None: it has no target."""
        coordinator.description = description
        self._last_description = description or self._last_description

    def silent(self) -> list[KnownCoordinator]:
        """Return those that have said nothing for a lease's time, and are not taken for lost yet."""
        now_s = self._clock.now_s()
        self._forgive_standstill(now_s)
        return [one for one in self if one.is_reachable and now_s - one.heard_s > self._lease_s]

    def give_up(self, coordinator: KnownCoordinator) -> bool:
        """Take one for lost; return whether that is news."""
        if not coordinator.is_reachable:
            return False
        self._doubt(coordinator)
        coordinator.is_reachable = False
        return True

    def take_state(self, coordinator: KnownCoordinator, pong: Pong) -> None:
        """Note what it says of itself."""
        coordinator.is_closing = coordinator.is_closing or pong.closing
        self._settle_closing()
        if pong.draining:
            self.drains(coordinator)
        coordinator.is_draining = pong.draining
        coordinator.has_target = not pong.without_target
        coordinator.reported_load = pong.num_running + pong.num_waiting

    def drains(self, coordinator: KnownCoordinator) -> None:
        """Note that it takes no more requests."""
        self._doubt(coordinator)
        coordinator.is_draining = True

    def fitting(self, revision: str | None, refused_by: Set[PeerId]) -> list[KnownCoordinator]:
        """Return those that may be sent a request; those without a target only where nobody has one.

        `revision`: of the model that has begun to answer; None: any.
        """
        fitting = [
            one
            for one in self.takers
            if one.peer_id not in refused_by and revision in {None, one.member.model_revision}
        ]
        return [one for one in fitting if one.has_target] or fitting

    def _forgive_standstill(self, now_s: float) -> None:
        """Blame no coordinator for a time in which nothing was taken in here."""
        forgiven_s = self._standstill.forgiven_s(now_s, self._lease_s)
        if forgiven_s > 0.0:
            for one in self:
                one.heard_s = min(now_s, one.heard_s + forgiven_s)

    def _settle_closing(self) -> None:
        if self._known:
            self.is_closing = all(one.is_closing for one in self)

    def _doubt(self, lost: KnownCoordinator) -> None:
        if lost.takes_requests:
            self.doubtful_until_s = self._clock.now_s() + self._lease_s
