"""From the members of a cluster, and what its coordinators tell, to one status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from cluster.directory import Member
from specdec.transport.base import PeerId
from specdec.transport.status import DraftWorkerStatus, ServiceStatus, TargetGroupStatus


def service_status(members: Iterable[Member], told: Mapping[PeerId, TargetGroupStatus]) -> ServiceStatus:
    """Return the status of all members, oldest first.

    Args:
        members: of the directory, whether or not they can be reached.
        told: by coordinator that has answered.
    """
    by_age = sorted(members, key=lambda member: (member.since, member.peer_id))
    return ServiceStatus(
        target_groups=tuple(
            _target_group(member, told.get(member.peer_id))
            for member in by_age
            if member.role == "coordinator"
        ),
        draft_workers=tuple(
            _draft_worker(member, told.values()) for member in by_age if member.role == "draft"
        ),
    )


def _target_group(member: Member, told: TargetGroupStatus | None) -> TargetGroupStatus:
    if told is None:
        return TargetGroupStatus(
            id=member.peer_id,
            is_answering=False,
            is_serving=False,
            since=member.since,
            compile_state=member.compile_state,
            max_num_running=member.capacity,
        )
    return msgspec.structs.replace(told, id=member.peer_id, compile_state=member.compile_state)


def _draft_worker(member: Member, told: Iterable[TargetGroupStatus]) -> DraftWorkerStatus:
    by_group = [
        (group, link) for group in told for link in group.draft_workers if link.worker == member.peer_id
    ]
    links = [link for _, link in by_group]
    # A group without a target still tells of the last seconds in which it had one.
    now = [link for group, link in by_group if group.is_serving]
    shares = [link.utilization for link in now if link.utilization is not None]
    return DraftWorkerStatus(
        id=member.peer_id,
        since=member.since,
        incarnation=member.incarnation,
        compile_state=member.compile_state,
        is_waited_for=any(link.is_waited_for for link in links) if links else None,
        num_requests=sum(link.num_requests for link in links),
        max_requests=member.capacity,
        online=member.online,
        utilization=min(1.0, sum(shares)) if shares else None,
    )
