"""The Coordinator deployment: one replica is one target group with its scheduler and round loop."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import Any

import msgspec
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from cluster.autoscaling.draft_demand import demand_of
from cluster.autoscaling.serve_policy import group_stats
from cluster.autoscaling.waking import PoolWaker
from cluster.autoscaling.wanted import tell_woken
from cluster.config import ClusterConfig
from cluster.desk import RequestDesk
from cluster.directory import Member
from cluster.directory_actor import DirectoryLink
from cluster.engine_loop import EngineLoop
from cluster.generation import draft_generation, target_generation
from cluster.handover import may_refuse
from cluster.pool_drafter import drafter_of_pool
from cluster.runtime import bind_host, channel_options, new_peer_id, own_application, own_placement_group
from cluster.target_group import TargetGroup
from specdec.core.clock import MonotonicClock
from specdec.core.error_codes import COORDINATOR_FAILED
from specdec.engine.config import EngineConfig
from specdec.transport.pump import ChannelPump
from specdec.transport.status import RecentStatus
from specdec.transport.zmq import KeyPair, ZmqChannel
from workers.process import prepare_logging, settle_memory
from workers.start_limit import START_MARGIN_S, ends_unless_started

logger = logging.getLogger(__name__)

_FLUSH_S = 2.0
_TICK_S = 0.5


def _start_limit_s(engine: EngineConfig, cluster: ClusterConfig, draft_pool: object = None) -> float:
    return cluster.target_groups.load_timeout_s + engine.speculative_config.profile_seconds + START_MARGIN_S


class CoordinatorReplica:
    """Serves ingresses over a channel. Serve starts it, watches it, and drains it before it ends.

    The constructor returns when the target is loaded and the replica is in the directory.
    """

    @ends_unless_started("coordinator", _start_limit_s)
    def __init__(self, engine: EngineConfig, cluster: ClusterConfig, draft_pool: object = None) -> None:
        """`draft_pool` makes Serve deploy the pool with us, and wakes it: its workers are found in the
        directory."""
        self._peer_id = new_peer_id("coordinator")
        prepare_logging(self._peer_id)
        self._cluster = cluster
        self._draft_generation = draft_generation(drafter_of_pool(engine) or engine)
        self._closed = False
        self._pool_waker: PoolWaker | None = None
        if draft_pool is not None:
            tell = partial(tell_woken, cluster.namespace, "draft")
            self._pool_waker = PoolWaker(draft_pool, cluster.draft_pool, tell)
        self._has_drafters = False
        self._demand_due_s = 0.0
        self._announcing = threading.Lock()
        keys = KeyPair.generate()
        options = channel_options(cluster.channels)
        channel = ZmqChannel(self._peer_id, host=bind_host(cluster.channels), keys=keys, options=options)
        self._pump = ChannelPump(channel, name="front")
        self._desk = RequestDesk(
            self._pump.send,
            MonotonicClock(),
            lease_s=cluster.membership.lease_s,
            most_without_target=engine.scheduler.max_num_seqs + engine.scheduler.max_num_waiting,
            max_message_bytes=options.max_message_bytes,
        )
        self._group = TargetGroup(engine, cluster, self._peer_id, keys)
        self._loop = EngineLoop(self._desk, self._group, channel.counters)
        self._directory = DirectoryLink(
            namespace=cluster.namespace,
            lease_s=cluster.membership.lease_s,
            renew_s=cluster.membership.renew_s,
            on_change=self._follow,
            name=self._peer_id,
            application=own_application(),
        )
        self._member = Member(
            address=channel.address,
            role="starting",
            capacity=engine.scheduler.max_num_seqs,
            generation=target_generation(engine),
            placement_group=own_placement_group(),
        )
        self._directory.announce(self._member)
        self._directory.start()
        try:
            self._loop.start()
            while not self._loop.wait_ready(_TICK_S):
                self._announce(tensors=self._group.tensors)
        except BaseException:
            self._close()
            raise
        description = self._desk.description
        assert description is not None
        settle_memory()
        self._announce(
            role="coordinator",
            model_revision=description.revision,
            since=time.time(),
            compile_state=self._group.compile_state,
            tensors=self._group.tensors,
        )
        self._pump.start(self._desk.hear, on_tick=self._tick, tick_s=_TICK_S)
        logger.info("coordinator %s is ready: %s", self._peer_id, description.model_id)

    def check_health(self) -> None:
        """Raise when this replica can serve no more and must be replaced."""
        if not self._loop.is_alive:
            raise RuntimeError("the engine's thread has ended")
        if not self._pump.is_alive:
            raise RuntimeError("the channel's thread has ended")
        if not self._directory.is_alive:
            raise RuntimeError("the directory's thread has ended")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy wants to know of this replica."""
        recent = self._recent()
        return group_stats(
            self._desk.metrics(),
            round_s=None if recent is None else recent.round_s,
            has_target=self._desk.description is not None,
        )

    def wake(self) -> None:
        """Do nothing: a call that waits for a replica makes Serve start one where there is none."""

    def close_down(self, limit_s: float) -> None:
        """Prepare for the end of the whole deployment: take no more requests, end what outlasts `limit_s`."""
        self._desk.close_down(limit_s)

    def num_streams(self) -> int:
        """Streams that have not ended."""
        return self._desk.num_streams

    def metrics(self) -> dict[str, float]:
        """Current counters and gauges."""
        return self._desk.metrics()

    def __del__(self) -> None:
        """Called by Serve before the replica ends: serve what is here, then leave."""
        if not self._closed:
            self._drain()

    def _tick(self) -> None:
        self._desk.tick()
        self._announce(compile_state=self._group.compile_state, tensors=self._group.tensors)
        if self._pool_waker is not None:
            self._pool_waker.consider(is_needed=self._desk.num_streams > 0 and not self._has_drafters)
            self._report_demand()

    def _announce(self, **changes: Any) -> None:
        """Tell the directory what has changed of us, if anything has (any thread)."""
        with self._announcing:
            member = msgspec.structs.replace(self._member, **changes)
            if member != self._member:
                self._member = member
                self._directory.announce(member)

    def _report_demand(self) -> None:
        """Tell the draft pool's replicas what we want of them, where that decides how many there are."""
        if self._cluster.draft_pool.autoscaling is None or time.monotonic() < self._demand_due_s:
            return
        self._demand_due_s = time.monotonic() + self._cluster.membership.renew_s
        demand = demand_of(self._desk.metrics(), self._recent())
        # In the channel's thread, in which nothing may wait: what is lost is told again.
        self._directory.tell("report_demand", self._peer_id, demand)

    def _recent(self) -> RecentStatus | None:
        """Return what rounds are like; None while there is no target: what is known is of the one before."""
        status = self._desk.status
        return None if status is None or self._desk.description is None else status.recent

    def _follow(self, members: tuple[Member, ...]) -> None:
        """Let current ingresses speak to us; use current draft workers."""
        self._pump.channel.admit([member.address for member in members if member.role == "ingress"])
        drafters = [
            member
            for member in members
            if member.role == "draft" and member.generation == self._draft_generation
        ]
        self._has_drafters = bool(drafters)
        self._group.set_drafters(drafters)

    def _drain(self) -> None:
        limit_s = self._cluster.drain_timeout_s
        is_closing = _is_application_ending(have_others_to_go_on=self._have_others_to_go_on())
        if is_closing:
            self._desk.close_down(limit_s)
        else:
            self._announce(is_leaving=True)
        # The desk ends them by itself when the deployment ends; it looks once per tick.
        give_up_s = time.monotonic() + limit_s + (2 * _TICK_S if is_closing else 0.0)
        # So long it takes until whoever leaves at the same time has heard of us, and we of them.
        heard_s = min(give_up_s, time.monotonic() + 2 * self._cluster.membership.renew_s)
        is_draining = is_closing
        while time.monotonic() < give_up_s and (self._desk.num_streams or not is_draining):
            if not is_draining and time.monotonic() >= heard_s:
                is_draining = may_refuse(self._member, self._directory.members)
                if is_draining:
                    self._desk.drain()
            time.sleep(0.05)
        if self._desk.num_streams:
            logger.warning("%d streams are left to other coordinators", self._desk.num_streams)
            self._desk.end_all("the coordinator was shut down", COORDINATOR_FAILED)
        self._close()

    def _have_others_to_go_on(self) -> bool:
        return any(
            member.role == "coordinator"
            and member.generation == self._member.generation
            and member.peer_id != self._peer_id
            and not member.is_leaving
            for member in self._directory.members
        )

    def _close(self) -> None:
        self._closed = True
        self._directory.close()
        self._loop.stop()
        self._group.stop()
        self._pump.close(_FLUSH_S)


def _is_application_ending(*, have_others_to_go_on: bool) -> bool:
    """Whether Serve ends this replica because it deletes the whole application, not to replace it.

    Where Serve does not say: not if others are there, who go on with what this one leaves. Doors that hear
    that all ends wait for nobody.
    """
    name = serve.get_replica_context().app_name
    try:
        application = serve.status().applications.get(name)
    except (RayError, RayServeException) as error:
        logger.warning("Serve does not say why this replica ends: %s", error)
        return not have_others_to_go_on
    return application is None or application.status == ApplicationStatus.DELETING
