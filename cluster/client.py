"""The cluster as a door sees it: a `GenerationService` over channels to coordinators."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from cluster.autoscaling.wanted import Part, WantedNumbers
from cluster.config import ClusterConfig
from cluster.directory import Member, count_workers
from cluster.directory_actor import DirectoryLink
from cluster.door_account import Collected, DoorAccount
from cluster.group_metrics import GroupMetrics
from cluster.handover import Turn, are_others_there
from cluster.runtime import bind_host, channel_options, new_peer_id
from cluster.series import channel_dropped_series
from cluster.shared_metrics import sound_part
from cluster.status import service_status
from cluster.stream_book import StreamBook, ended_before
from specdec.core.clock import MonotonicClock
from specdec.core.description import TargetDescription
from specdec.core.errors import DrafthouseError
from specdec.core.ids import RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.transport.base import Envelope, PeerId
from specdec.transport.messages import (
    DoorReport,
    Message,
    MetricsQuery,
    MetricsReply,
    Recall,
    Recalled,
    StatusQuery,
    StatusReply,
)
from specdec.transport.pump import ChannelPump
from specdec.transport.status import ServiceStatus
from specdec.transport.zmq import ZmqChannel

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_ANSWER_TIMEOUT_S = 2.0
_WAKE_AGAIN_S = 5.0
"""A call that has brought nobody is made anew after so long at the earliest."""
_MAX_FAILED_TICKS = 10
"""In a row. One may be the fault of one stream; after so many, nobody is pinged or placed any more."""


class ClusterService:
    """Implements `GenerationService`. Belongs to the event loop in which it was started.

        service = ClusterService(cluster_config)
        await service.start()
        async for output in service.generate(request): ...
        await service.close()

    Request id, seed and first epoch come with each request; later epochs are minted here.
    """

    def __init__(
        self,
        cluster: ClusterConfig,
        generation: str = "",
        *,
        wake: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Open the channel. Ray must be connected; `cluster` must be resolved (`application.resolve`).

        Only coordinators of that generation are used; of any, if it is empty. `wake` makes a first
        coordinator start and waits for it; with it, requests wait where there is none. It is called for
        requests that wait, and by a door that finds nobody there and has yet to learn what the model is.
        """
        self._generation = generation
        self._peer_id = new_peer_id("ingress")
        self._cluster = cluster
        self._channel = ZmqChannel(
            self._peer_id, host=bind_host(cluster.channels), options=channel_options(cluster.channels)
        )
        self._pump = ChannelPump(self._channel, name="ingress")
        self._book = StreamBook(
            self._pump.send,
            MonotonicClock(),
            lease_s=cluster.membership.lease_s,
            failover_timeout_s=cluster.failover_timeout_s,
            routing=cluster.routing,
            may_be_none=wake is not None,
            max_groups=cluster.target_groups.max_groups,
            max_message_bytes=cluster.channels.max_message_bytes,
        )
        self._wake = wake
        self._waking: asyncio.Task[None] | None = None
        self._woken_s = -math.inf
        self._connected: dict[PeerId, Member] = {}
        self._members: tuple[Member, ...] = ()
        self._waiters: dict[int, asyncio.Queue[Envelope]] = {}
        self._next_query = 0
        self._since = time.time()
        self._groups = GroupMetrics()
        self._wanted = _wanted_numbers(cluster)
        self._own: Callable[[], DoorReport] = _nothing
        self._account = DoorAccount(
            self._channel.address,
            self._since,
            self._generation,
            self._pump,
            self._collect,
            self._report,
            self._note_taken_over,
        )
        self._asking_for_metrics = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._num_failed_ticks = 0
        """In a row."""
        self._changed = asyncio.Event()
        self._has_seen_members = asyncio.Event()
        self._directory: DirectoryLink | None = None

    async def start(self) -> None:
        """Join the cluster. Idempotent."""
        if self._loop is not None:
            return
        loop = self._loop = asyncio.get_running_loop()
        membership = self._cluster.membership
        self._pump.start(lambda envelope: _call(loop, self._hear, envelope))
        self._directory = DirectoryLink(
            namespace=self._cluster.namespace,
            lease_s=membership.lease_s,
            renew_s=membership.renew_s,
            on_change=lambda members: _call(loop, self._follow, members),
            name=self._peer_id,
        )
        self._directory.announce(
            Member(
                address=self._channel.address,
                role="ingress",
                generation=self._generation,
                since=self._since,
            )
        )
        self._directory.start()
        self._wanted.start()
        self._ticking = asyncio.create_task(self._tick(), name="cluster-service-tick")
        self._account.start()

    async def close(self) -> None:
        """Leave the cluster. Streams still open end in an error."""
        self._book.end_all()
        self._wanted.close()
        await self._account.close()
        for task in (self._ticking, self._waking):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._directory is not None:
            await asyncio.to_thread(self._directory.close)
        await asyncio.to_thread(self._pump.close, 1.0)

    def check_health(self) -> None:
        """Raise when this service, which was started, can serve no more; it does not mend itself.

        Raises:
            RuntimeError: saying what has ended.
        """
        if not self._pump.is_alive:
            raise RuntimeError("the channel's thread has ended")
        if self._directory is None or not self._directory.is_alive:
            raise RuntimeError("the directory's thread has ended")
        if self._num_failed_ticks >= _MAX_FAILED_TICKS:
            raise RuntimeError("streams are not looked after any more")

    def description(self) -> TargetDescription | None:
        """Facts about the target; None while no coordinator can be reached."""
        return self._book.description

    async def wait_ready(self, timeout_s: float) -> TargetDescription:
        """Wait until a coordinator can be reached.

        Raises:
            TimeoutError: none could be in that time.
        """
        async with asyncio.timeout(timeout_s):
            while (description := self._book.description) is None:
                self._changed.clear()
                await self._changed.wait()
        return description

    async def wait_for_turn(self) -> None:
        """Wait while only others are there, of another generation: until then, their doors serve.

        Returns at once where nobody is there, or a coordinator of the own generation.
        """
        await self._has_seen_members.wait()
        turn = Turn(patience_s=2 * self._cluster.membership.lease_s)
        while not turn.has_come(
            has_own=self._book.description is not None,
            has_others=self._has_others,
            now_s=time.monotonic(),
        ):
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._changed.wait()

    @property
    def _has_others(self) -> bool:
        return are_others_there(self._generation, self._members, may_be_none=self._wake is not None)

    def _is_partner(self, member: Member) -> bool:
        return member.role == "coordinator" and self._generation in {"", member.generation}

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Yield the request's outputs, across losses of coordinators; see `GenerationService`."""
        await self.start()
        events: asyncio.Queue[RequestOutput | DrafthouseError] = asyncio.Queue()
        self._book.open(request, events.put_nowait)
        self._wake_if_needed()
        try:
            while True:
                event = await events.get()
                if isinstance(event, DrafthouseError):
                    raise event
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self._book.close(request.request_id)

    async def abort(self, request_id: RequestId) -> None:
        """End a request early; its stream ends with finish reason "abort"."""
        self._book.abort(request_id)

    async def recall(self, names: Sequence[str], proof: bytes) -> Sequence[tuple[str, tuple[int, ...]]]:
        """Ask every coordinator that can be reached what it remembers; see `GenerationService`.

        Raises:
            RequestFailed: that their response has ended as `request_failed_repeatedly`.
        """
        await self.start()
        envelopes = await self._ask(lambda nonce: Recall(nonce, tuple(names), proof))
        recalled = [one.message for one in envelopes if isinstance(one.message, Recalled)]
        if self._book.has_failed(names, proof) or any(one.has_failed for one in recalled):
            raise ended_before()
        return [stream for one in recalled for stream in one.streams]

    def share(self, own: Callable[[], DoorReport]) -> None:
        """Have what `own` says added to that of all other doors, in `metrics`."""
        self._own = own

    @property
    def adds_up(self) -> bool:
        """Whether, of several doors, this one adds up what all have counted."""
        return self._account.keeps

    @property
    def num_doors(self) -> int:
        """Doors that are there, this one and those that are closing included, also of a former target: they
        share the limits of API keys.
        """
        doors = {member.peer_id for member in self._members if member.role == "ingress"}
        return len(doors | {self._peer_id})

    async def metrics(self) -> Mapping[str, float]:
        """Metrics of all coordinators and all doors together.

        Raises:
            NotReadyError: other doors, who know more, have not told yet.
        """
        await self.start()
        totals = await self._account.totals()
        return {**totals.counters, **totals.gauges}

    async def _collect(self) -> Collected:
        # One at a time: answers to an earlier question must not come in after those to a later one.
        async with self._asking_for_metrics:
            envelopes = await self._ask(MetricsQuery)
            self._groups.hear(
                {
                    one.sender: self._sound(one.message)
                    for one in envelopes
                    if isinstance(one.message, MetricsReply)
                }
            )
        present = self._book.coordinators
        values = {
            **self._groups.values(present),
            "coordinators": float(len(present)),
            "coordinators_with_target": float(self._book.num_serving),
            "target_groups_wanted": float(self._wanted.of("target")),
            'scales_to_zero{part="target"}': float(self._cluster.target_groups.may_be_none),
            'scales_to_zero{part="draft"}': float(self._cluster.draft_pool.may_be_none),
            **count_workers(self._members),
            **self._of_directory(),
        }
        if "draft_workers" in values:  # groups that draft by themselves know of no pool
            values["draft_workers_wanted"] = float(self._wanted.of("draft"))
        return Collected(values, self._groups.has_heard(present))

    def _of_directory(self) -> Mapping[str, float]:
        directory = self._directory
        if directory is None:
            return {}
        values = {"directory_silent_seconds": directory.silent_s}
        if directory.num_lost_ingresses is not None:
            values["ingress_losses"] = float(directory.num_lost_ingresses)
        return values

    def _note_taken_over(self) -> None:
        """What another door had told has groups in it that this one may not have heard yet."""
        self._groups.count_as_told(member.peer_id for member in self._members if member.role == "coordinator")

    def _sound(self, reply: MetricsReply) -> Mapping[str, float]:
        values = sound_part(reply.values)
        self._book.counters["unexpected_messages_dropped"] += len(values) < len(reply.values)
        return values

    def _report(self) -> DoorReport:
        own = self._own()
        counted = {name: float(value) for name, value in self._book.counters.items()}
        counted["unexpected_messages_dropped"] = float(
            self._book.counters["unexpected_messages_dropped"] + self._account.num_dropped
        )
        counted |= channel_dropped_series("ingress", self._channel.counters.dropped)
        waiting = {"num_requests_without_group": float(self._book.num_homeless)}
        return DoorReport({**own.counters, **counted}, {**own.gauges, **waiting})

    async def status(self) -> ServiceStatus:
        """What all target groups and draft workers are doing."""
        await self.start()
        told = {
            envelope.sender: envelope.message.status
            for envelope in await self._ask(StatusQuery)
            if isinstance(envelope.message, StatusReply) and envelope.message.status is not None
        }
        return service_status(self._members, told)

    async def _ask(self, query: Callable[[int], Message]) -> list[Envelope]:
        """Ask all coordinators that can be reached; return the replies of those that are quick enough."""
        asked = self._book.coordinators
        answers: asyncio.Queue[Envelope] = asyncio.Queue()
        nonce = self._next_query
        self._next_query += 1
        self._waiters[nonce] = answers
        replies: list[Envelope] = []
        try:
            for coordinator in asked:
                self._pump.send(coordinator, query(nonce))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    for _ in asked:
                        replies.append(await answers.get())
        finally:
            del self._waiters[nonce]
        return replies

    def _hear(self, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, MetricsReply | StatusReply | Recalled):
            waiter = self._waiters.get(message.nonce)
            if waiter is not None:
                waiter.put_nowait(envelope)
            return
        if self._account.hear(envelope.sender, message):
            return
        self._book.hear(envelope)
        self._changed.set()

    def _follow(self, members: tuple[Member, ...]) -> None:
        """Connect to the coordinators that are there, and to no others."""
        self._members = members
        present = {member.peer_id: member for member in members if self._is_partner(member)}
        for peer_id in self._connected.keys() - present.keys():
            self._pump.disconnect(peer_id)
        for peer_id in present.keys() - self._connected.keys():
            self._pump.connect(present[peer_id].address)
        self._connected = present
        self._account.set_members(members)
        self._book.set_coordinators(present.values())
        self._has_seen_members.set()

    def _wake_if_needed(self) -> None:
        if self._wake is None or not (self._is_missed or self._will_be_missed):
            return
        now_s = time.monotonic()
        if (self._waking is None or self._waking.done()) and now_s >= self._woken_s + _WAKE_AGAIN_S:
            self._woken_s = now_s
            self._waking = asyncio.ensure_future(self._wake())

    @property
    def _is_missed(self) -> bool:
        """Whether there is no coordinator, and something that needs one."""
        return self._book.is_deserted and (self._book.has_homeless or self._is_without_model)

    @property
    def _will_be_missed(self) -> bool:
        """Whether there is work for coordinators, all of which are about to go.

        Where they are scaled to zero, the last serves whatever comes for a while (`handover`). What it cannot
        end by then would wait for a successor to start only then.
        """
        present = self._connected.values()
        is_served = self._book.num_streams > 0 and not self._book.is_deserted
        return is_served and bool(present) and all(member.is_leaving for member in present)

    @property
    def _is_without_model(self) -> bool:
        """Whether nobody is there, nor has been, to say what the model is.

        Every request is refused then, so that none would ever wait for a group to be started.
        """
        return self._has_seen_members.is_set() and self._book.description is None

    async def _tick(self) -> None:
        while True:
            assert self._directory is not None, "it is there before this task begins"
            try:
                self._book.tick(directory_silent_s=self._directory.silent_s)
                self._wake_if_needed()
            except Exception:  # a border: what fails for one stream must not end pings, and all others
                if self._num_failed_ticks == 0:
                    logger.exception("streams could not be looked after")
                self._num_failed_ticks += 1
            else:
                self._num_failed_ticks = 0
            await asyncio.sleep(_TICK_S)


def _wanted_numbers(cluster: ClusterConfig) -> WantedNumbers:
    groups, pool = cluster.target_groups, cluster.draft_pool
    at_first: dict[Part, int] = {"target": groups.num_groups, "draft": pool.num_workers}
    follows: list[Part] = []
    if groups.autoscaling is not None:
        at_first["target"] = groups.autoscaling.min_groups
        follows.append("target")
    if pool.autoscaling is not None:
        at_first["draft"] = pool.autoscaling.min_workers
        follows.append("draft")
    return WantedNumbers(cluster.namespace, at_first, follows=follows)


def _nothing() -> DoorReport:
    return DoorReport({}, {})


def _call(loop: asyncio.AbstractEventLoop, function: object, argument: object) -> None:
    """Call in the loop's thread; quietly nothing when the loop is closed already."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, argument)  # type: ignore[arg-type]
