"""Who is there: a register with leases, and the cached view of it that every process keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

import msgspec

from cluster.standstill import Standstill
from specdec.core.idle_work import WorkState
from specdec.transport.base import PeerAddress, PeerId
from specdec.transport.status import OnlineStatus

ReportT = TypeVar("ReportT")
Role = Literal["ingress", "coordinator", "draft", "starting"]
"""starting: a coordinator whose target is being loaded. Draft workers answer it, so that it can measure what
drafts cost; nobody else takes it for there."""

_QUIET_LEASES = 10
"""Leases without a call after which a directory is of no use to anybody."""


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process that others speak to. A restarted process is another member."""

    address: PeerAddress
    role: Role
    capacity: int = 0
    """Sequences that it serves at once."""
    model_revision: str = ""
    """Of a coordinator: revision of its target."""
    since: float = 0.0
    """When it was ready, in seconds since the epoch by its own clock."""
    incarnation: int = 1
    """Of a draft worker: which of its place in the pool it is."""
    generation: str = ""
    """Of which version of the deployment (`cluster.generation`); members of others are no partners."""
    is_leaving: bool = False
    """Of a coordinator: that it is being shut down, and takes requests only while nobody else of its
    generation does."""
    placement_group: str = ""
    """Of a coordinator or draft worker: id of the placement group of its replica."""
    compile_state: WorkState = "off"
    """Of a draft worker, and of a coordinator's target worker: what has become of compiling its forward."""
    tensors: PeerAddress | None = None
    """Where a draft worker takes hidden states, and from where a coordinator's target worker sends them; None
    where nobody needs any."""
    online: OnlineStatus | None = None
    """Of a draft worker: what its draft model has learnt; None: it does not learn."""
    device: str = ""
    """Of a draft worker: what it runs on, in words; what drafting costs depends on that."""

    @property
    def peer_id(self) -> PeerId:
        """Id of the process."""
        return self.address.peer_id


def count_workers(members: Iterable[Member]) -> dict[str, float]:
    """Return the gauges `num_workers{part, compile}`: workers by model and state of compiling it."""
    counts = Counter((member.role, member.compile_state) for member in members)
    parts: tuple[tuple[str, Role], ...] = (("target", "coordinator"), ("draft", "draft"))
    return {
        f'num_workers{{part="{part}",compile="{state}"}}': float(counts[role, state])
        for part, role in parts
        for state in get_args(WorkState)
    }


class DirectoryVersion(NamedTuple):
    """A state of one incarnation of the directory; a new incarnation starts empty."""

    incarnation: int
    change: int


class DirectorySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All members at one moment."""

    version: DirectoryVersion
    members: tuple[Member, ...]
    num_lost_ingresses: int = 0
    """Whose lease ended before they left, since the directory was started."""

    def with_role(self, role: Role) -> tuple[Member, ...]:
        """Members of one kind."""
        return tuple(member for member in self.members if member.role == role)


class DirectoryState:
    """The register itself. Times are seconds of whatever clock the caller uses."""

    def __init__(self, *, lease_s: float, incarnation: int) -> None:
        """`lease_s`: of members that do not say theirs."""
        self._lease_s = lease_s
        self._standstill = Standstill()
        self._incarnation = incarnation
        self._changes = 0
        self._members: dict[PeerId, Member] = {}
        self._leases_s: dict[PeerId, float] = {}
        self._expiry_s: dict[PeerId, float] = {}
        self._num_lost_ingresses = 0

    def announce(self, member: Member, now_s: float, lease_s: float | None = None) -> None:
        """Register a member, or renew its lease, which is as long as it says.

        The register outlives versions of the deployment, and these may differ in how often they renew.
        """
        self._forgive_standstill(now_s)
        if self._members.get(member.peer_id) != member:
            self._members[member.peer_id] = member
            self._changes += 1
        lease_s = self._lease_s if lease_s is None else lease_s
        self._leases_s[member.peer_id] = lease_s
        self._expiry_s[member.peer_id] = now_s + lease_s

    def leave(self, peer_id: PeerId) -> None:
        """Remove a member. Unknown ids are ignored."""
        if self._members.pop(peer_id, None) is not None:
            del self._expiry_s[peer_id], self._leases_s[peer_id]
            self._changes += 1

    def snapshot(self, now_s: float) -> DirectorySnapshot:
        """Drop those whose lease is over and return the rest."""
        self._forgive_standstill(now_s)
        for peer_id in [peer_id for peer_id, until_s in self._expiry_s.items() if until_s <= now_s]:
            self._num_lost_ingresses += self._members[peer_id].role == "ingress"
            self.leave(peer_id)
        return DirectorySnapshot(
            version=DirectoryVersion(self._incarnation, self._changes),
            members=tuple(self._members.values()),
            num_lost_ingresses=self._num_lost_ingresses,
        )

    def _forgive_standstill(self, now_s: float) -> None:
        """Leave out of all leases a time in which nobody was heard, because nobody could be."""
        # The longest of them counts: where only members with long leases are left, nobody is heard for longer
        # than a short one.
        forgiven_s = self._standstill.forgiven_s(now_s, max(self._leases_s.values(), default=self._lease_s))
        if forgiven_s > 0.0:
            for peer_id in self._expiry_s:
                self._expiry_s[peer_id] += forgiven_s


class Desertion:
    """Whether nobody has called for so long that nobody will, by looks and not by seconds.

    Who was stopped, or cut off, as a whole has not looked meanwhile, and finds its callers waiting.
    """

    def __init__(self, *, look_s: float, min_quiet_s: float) -> None:
        """Be looked at every `look_s` seconds."""
        self._look_s = look_s
        self._limit_s = min_quiet_s
        self._num_quiet_looks = 0

    def hear(self, lease_s: float) -> None:
        """Somebody with such a lease has called."""
        self._num_quiet_looks = 0
        self._limit_s = max(self._limit_s, _QUIET_LEASES * lease_s)

    def look(self) -> bool:
        """Look once more; return whether everybody is gone for good."""
        self._num_quiet_looks += 1
        return self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether everybody is gone for good, as far as the last look told."""
        return self._num_quiet_looks * self._look_s >= self._limit_s


class Reports(Generic[ReportT]):
    """What processes said last. Who has said nothing for a while is left out."""

    def __init__(self, *, forget_after_s: float) -> None:
        self._forget_after_s = forget_after_s
        self._said: dict[PeerId, tuple[ReportT, float]] = {}

    def keep_for(self, at_least_s: float) -> None:
        """Forget nothing sooner than that: whoever reports may do so more seldom than was thought."""
        self._forget_after_s = max(self._forget_after_s, at_least_s)

    def note(self, sender: PeerId, report: ReportT | None, now_s: float) -> None:
        """Take in what a process says; None: nothing more."""
        self._said.pop(sender, None)
        if report is not None:
            self._said[sender] = (report, now_s)

    def current(self, now_s: float) -> tuple[ReportT, ...]:
        """Return what was said lately."""
        self._said = {
            sender: (report, said_s)
            for sender, (report, said_s) in self._said.items()
            if now_s - said_s < self._forget_after_s
        }
        return tuple(report for report, _ in self._said.values())


class DirectoryView:
    """One process's cache of the directory. It outlives the directory.

    When a new incarnation of the directory takes over, members of the old one count as present until they
    have had one lease's time to announce themselves anew.
    """

    def __init__(self, *, lease_s: float) -> None:
        self._lease_s = lease_s
        self._version: DirectoryVersion | None = None
        self._members: dict[PeerId, Member] = {}
        self._doubtful: dict[PeerId, float] = {}
        self.num_lost_ingresses: int | None = None
        """As the directory has said last; None: it has not been heard."""

    @property
    def version(self) -> DirectoryVersion | None:
        """The version seen last."""
        return self._version

    @property
    def members(self) -> tuple[Member, ...]:
        """Everybody who is believed to be there."""
        return tuple(self._members.values())

    def with_role(self, role: Role) -> tuple[Member, ...]:
        """Members of one kind."""
        return tuple(member for member in self._members.values() if member.role == role)

    def take(self, snapshot: DirectorySnapshot | None, now_s: float) -> bool:
        """Take a snapshot in (None: nothing new was said); return whether the members changed."""
        before = self.members
        if snapshot is not None:
            present = {member.peer_id: member for member in snapshot.members}
            is_successor = (
                self._version is not None and snapshot.version.incarnation != self._version.incarnation
            )
            if is_successor:
                for peer_id in self._members:
                    self._doubtful.setdefault(peer_id, now_s + self._lease_s)
            self._version = snapshot.version
            self.num_lost_ingresses = snapshot.num_lost_ingresses
            kept = {peer_id: m for peer_id, m in self._members.items() if peer_id in self._doubtful}
            self._members = {**kept, **present}
            for peer_id in present:
                self._doubtful.pop(peer_id, None)
        for peer_id in [peer_id for peer_id, until_s in self._doubtful.items() if until_s <= now_s]:
            del self._doubtful[peer_id]
            self._members.pop(peer_id, None)
        return self.members != before
