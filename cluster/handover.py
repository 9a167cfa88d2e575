"""When a coordinator that is being replaced may stop to take requests."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.directory import Member


def may_refuse(leaving: Member, members: Iterable[Member]) -> bool:
    """Whether requests have somewhere else to go, or nobody is there who would send any.

    Until the doors of its generation have closed, the last coordinator of a generation goes on: the doors of
    the next one open when Serve has started them, which is a moment after it has begun to stop this one.
    """
    kin = [
        member
        for member in members
        if member.generation in {"", leaving.generation} and member.peer_id != leaving.peer_id
    ]
    has_doors = any(member.role == "ingress" for member in kin)
    has_others = any(member.role == "coordinator" and not member.is_leaving for member in kin)
    return has_others or not has_doors
