"""Keeps, or follows, the account of what all doors have counted (`cluster.shared_metrics`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from cluster.directory import Member
from cluster.shared_metrics import SharedMetrics, is_sound
from specdec.core.errors import NotReadyError
from specdec.transport.base import LinkNews, PeerAddress, PeerId
from specdec.transport.messages import DoorReport, DoorTotals, Message
from specdec.transport.pump import ChannelPump

logger = logging.getLogger(__name__)

_REPORT_S = 2.0
_FIRST_ANSWER_S = 2 * _REPORT_S


class Collected(NamedTuple):
    """What a door knows of the target groups."""

    values: Mapping[str, float]
    is_complete: bool
    """Whether all that can be reached have told."""


class DoorAccount:
    """Belongs to the event loop in which it was started."""

    def __init__(
        self,
        address: PeerAddress,
        since: float,
        generation: str,
        pump: ChannelPump,
        collect: Callable[[], Awaitable[Collected]],
        report: Callable[[], DoorReport],
        note_taken_over: Callable[[], None],
    ) -> None:
        """`collect` asks the target groups; `report` says what this door has counted. `note_taken_over` is
        called when the account has gone on from what another door had told.
        """
        self._me = address.peer_id
        self._shared = SharedMetrics(address.peer_id, since, generation)
        self._pump = pump
        self._collect = collect
        self._report = report
        self._note_taken_over = note_taken_over
        self._linked: PeerId | None = None
        self._has_heard = asyncio.Event()
        self._reporting: asyncio.Task[None] | None = None
        self.num_dropped = 0
        """Messages of other doors that make no sense."""

    @property
    def keeps(self) -> bool:
        """Whether this door keeps the account."""
        return self._shared.keeps

    def start(self) -> None:
        """Begin to report, or to tell those who do."""
        self._reporting = asyncio.create_task(self._report_on(), name="door-account")

    async def close(self) -> None:
        """End it."""
        if self._reporting is not None:
            self._reporting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reporting

    def set_members(self, members: Sequence[Member]) -> None:
        """Let the doors that are there speak to this one; speak to the keeper."""
        doors = [member for member in members if member.role == "ingress"]
        others = {door.peer_id: door.address for door in doors if door.peer_id != self._me}
        with_groups = {member.generation for member in members if member.role == "coordinator"}
        self._shared.set_doors(doors, with_groups)
        self._pump.channel.admit(others.values())
        keeper = None if self._shared.keeps else self._shared.keeper
        if keeper == self._linked:
            return
        if self._linked is not None:
            self._pump.disconnect(self._linked)
        if keeper is not None:
            self._pump.connect(others[keeper])
        self._linked = keeper

    def hear(self, sender: PeerId, message: Message | LinkNews) -> bool:
        """Take a message in; return whether it was about the account."""
        if not isinstance(message, DoorReport | DoorTotals):
            return False
        if not is_sound(message):
            self.num_dropped += 1
            return True
        self._shared.hear(sender, message)
        if self._shared.told is not None:
            self._has_heard.set()
        return True

    async def totals(self) -> DoorTotals:
        """Return what all doors and target groups have counted.

        Raises:
            NotReadyError: others, who know more of the account, have not told of it yet.
        """
        if self._shared.keeps:
            # Not newer than what the others say: who asks one after the other would see numbers fall.
            told = self._shared.told if self._shared.listeners else None
            if told is None:
                told = await self._add_up(is_regular=False)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FIRST_ANSWER_S):
                    await self._has_heard.wait()
            told = self._shared.told
        if told is None:
            raise NotReadyError("not all ingresses have said yet what they have counted")
        return told

    async def _add_up(self, *, is_regular: bool = True) -> DoorTotals | None:
        collected = await self._collect()
        num_before = self._shared.num_taken_over
        totals = self._shared.add_up(
            self._report(), collected.values, is_complete=collected.is_complete, is_regular=is_regular
        )
        if self._shared.num_taken_over > num_before:
            self._note_taken_over()
        return totals

    async def _report_on(self) -> None:
        has_failed = False
        while True:
            await asyncio.sleep(_REPORT_S)
            try:
                await self._report_once()
            except Exception:  # a border: what fails once must not leave other doors without numbers for good
                if not has_failed:
                    logger.exception("what doors have counted could not be told")
                has_failed = True
            else:
                has_failed = False

    async def _report_once(self) -> None:
        if not self._shared.keeps:
            self._pump.send(self._shared.keeper, self._shared.report(self._report()))
        elif self._shared.listeners or self._shared.is_waiting:
            totals = await self._add_up()
            if totals is not None:
                for listener in self._shared.listeners:
                    self._pump.send(listener, totals)
