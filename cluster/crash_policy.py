"""Which request is to blame when targets and coordinators are lost: what is counted, and what follows.

A request that was in flight at `MAX_CRASHES` crashes is run alone next. Lost once more, it ends; after
`PROBATION_OUTPUTS` outputs it is cleared, so often at most, and then runs alone to its end.

A desk counts losses of its target, a door those of coordinators; the door has the whole account. So that
nothing is counted twice, nor lost between the two, crashes have names, and an account is a set of them.
Choices of one response share it: they have the same prompt, and fail together.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from specdec.core.ids import RequestId
from specdec.transport.base import PeerId

MAX_CRASHES = 2
"""A request that was in flight at so many losses of a target or a coordinator is next run alone, once."""

PROBATION_OUTPUTS = 8
"""Outputs after which a request that runs alone is cleared of the suspicion."""

MAX_CLEARED = 2
"""So often. One that kills later than that, each time, would never end otherwise."""

_CHOICE = re.compile(r"(?P<response>.+)-\d+(?:~[0-9a-f]+)?")


def response_of(request_id: RequestId | str) -> str:
    """Return the response that a stream is a choice of.

    Doors name choice i `RESPONSE-i`, with `~...` behind it where a client has come back. Any other id is a
    response of its own.
    """
    match = _CHOICE.fullmatch(request_id)
    return request_id if match is None else match["response"]


class Crash(NamedTuple):
    """One loss, by a name that is the same however often, and for however many streams, it is told."""

    coordinator: PeerId
    what: str

    @classmethod
    def of_link(cls, coordinator: PeerId) -> Crash:
        """Return that a coordinator is not heard of any more: where it was the link, this is taken back."""
        return cls(coordinator, "link")

    @classmethod
    def of_loop(cls, coordinator: PeerId) -> Crash:
        """Return that a coordinator's loop has failed, by what it said itself."""
        return cls(coordinator, "loop")

    @classmethod
    def of_target(cls, coordinator: PeerId, number: int = 0) -> Crash:
        """Return that a coordinator has lost its target for the `number`th time; 0: it did not say."""
        return cls(coordinator, f"target {number}")


class CrashRecord:
    """The crashes at which any choice of one response was in flight."""

    def __init__(self) -> None:
        self._crashes: set[Crash] = set()

    def __contains__(self, crash: Crash) -> bool:
        return crash in self._crashes

    def note(self, crash: Crash) -> None:
        """Count a crash, once. Who is not heard of after its loop has failed has not crashed once more."""
        if crash != Crash.of_link(crash.coordinator) or Crash.of_loop(crash.coordinator) not in self:
            self._crashes.add(crash)

    def take_back(self, crash: Crash) -> None:
        """Count a crash no more: there was none."""
        self._crashes.discard(crash)

    def without(self, forgiven: frozenset[Crash]) -> frozenset[Crash]:
        """Return what a stream is suspected for that has been cleared of some."""
        return frozenset(self._crashes - forgiven)
