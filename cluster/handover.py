"""When a coordinator that is being replaced may stop to take requests, and a new door may open."""

from __future__ import annotations

import math
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


def are_others_there(generation: str, members: Iterable[Member], *, may_be_none: bool) -> bool:
    """Whether a door of this generation would take the place of others, which serve or will do so again.

    Their coordinators may all be silent for a while: doors that are there know how to wait for them. With
    `may_be_none` those doors may have nobody left to wait for, and the new one has somebody started.
    """
    roles = {"coordinator"} if may_be_none else {"coordinator", "ingress"}
    return any(member.role in roles and generation not in {"", member.generation} for member in members)


class Turn:
    """When a door may open: it takes the place of one whose coordinators serve.

    It waits for a coordinator of its own generation, unless nobody is there whose place it could take. Those
    that have only been late to renew their leases are there again soon, so they have to be gone for a while.
    """

    def __init__(self, *, patience_s: float) -> None:
        """`patience_s`: how long others have to be gone."""
        self._patience_s = patience_s
        self._others_until_s = -math.inf

    def has_come(self, *, has_own: bool, has_others: bool, now_s: float) -> bool:
        """Whether it may open now.

        `has_own`: whether a coordinator of its own generation is there; `has_others`: `are_others_there`.
        """
        if has_others:
            self._others_until_s = now_s + self._patience_s
        return has_own or now_s >= self._others_until_s
