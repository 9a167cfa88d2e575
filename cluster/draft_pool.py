"""The DraftPool deployment: one replica is one draft worker, in a placement group of its own."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import msgspec
from ray.exceptions import RayError, RayTaskError

from cluster.autoscaling.draft_demand import DraftDemand, pool_stats, read_demands
from cluster.backoff import Attempts
from cluster.config import ClusterConfig
from cluster.directory import Member
from cluster.directory_actor import DirectoryLink
from cluster.draft_learning import DraftLearning
from cluster.generation import draft_generation
from cluster.placement import ModelRanks
from cluster.runtime import (
    bind_host,
    channel_options,
    new_peer_id,
    own_application,
    own_placement_group,
    rank_options,
    worker_options,
)
from cluster.start_reports import StartReporter
from cluster.worker_handle import WorkerHandle
from specdec.core.clock import MonotonicClock
from specdec.core.errors import DrafthouseError, TransportError
from specdec.engine.config import EngineConfig
from specdec.transport.base import PeerId
from workers.draft_worker import DraftWorker
from workers.online_trainer import OnlineTrainerWorker, PackedVersion
from workers.process import prepare_logging
from workers.start_limit import START_MARGIN_S, ends_unless_started

logger = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_MAX_ATTEMPTS = 8
"""To start a worker anew. After so many, in a minute or more, it is this place that cannot have one."""
_SOON_S = 5.0
"""A worker that is lost earlier counts as not started, or within so many looks at it, as it is seen to be
lost at the next one only. One that is killed by chance has served for longer."""
_SOON_LOOKS = 3
_FORGIVEN_AFTER_S = 60.0
"""A worker that is lost later is the first one to be lost."""
_REFUSALS = ("refused_entries", "outgrown_sequences")
"""Of a worker's counters: requests that it had no place or no memory for."""
_NEARLY_FULL = 0.99
"""Memory of which no more is free: only who refuses requests leaves some out."""
_FULL_S = 10.0
"""For how long a worker counts as full behind each refusal, beside the longest time between two attempts of
coordinators: as long as they go on in vain, Serve's mean over its reports is that of a full pool."""
_NEWS_S = 5.0
"""How often it is announced, at most, what the draft model has learnt: every member hears of it."""


def _start_limit_s(engine: EngineConfig, cluster: ClusterConfig) -> float:
    return cluster.draft_pool.load_timeout_s + START_MARGIN_S


class DraftPoolReplica:
    """Keeps one draft worker alive, registered, and informed of who may speak to it.

    The constructor returns when the worker has loaded its model.
    """

    @ends_unless_started("draft pool replica", _start_limit_s)
    def __init__(self, engine: EngineConfig, cluster: ClusterConfig) -> None:
        self._name = new_peer_id("draftpool")
        prepare_logging(self._name)
        self._engine = engine
        self._cluster = cluster
        self._coordinators: list[Member] = []
        self._news = threading.Event()
        """Set when there are others, or this place ends."""
        self._told: Any = None
        """Who may speak, as the present worker was told last."""
        self._stop = threading.Event()
        self._worker: WorkerHandle | None = None
        self._worker_id: PeerId | None = None
        self._num_workers = 0
        """Workers that have been ready, one after the other."""
        self._member: Member | None = None
        self._counters: dict[str, float] = {}
        self._full_until_s = 0.0
        self._demands: tuple[DraftDemand, ...] = ()
        self._announced_s = 0.0
        self._learning: DraftLearning | None = None
        if engine.speculative_config.online is not None:
            self._learning = DraftLearning(
                self._start_trainer, MonotonicClock(), patience_s=cluster.draft_pool.load_timeout_s
            )
        self._directory = DirectoryLink(
            namespace=cluster.namespace,
            lease_s=cluster.membership.lease_s,
            renew_s=cluster.membership.renew_s,
            on_change=self._follow,
            name=self._name,
            application=own_application(),
        )
        self._directory.start()
        try:
            self._start_worker()
        except BaseException:
            self._close()
            raise
        self._watch = threading.Thread(target=self._keep_alive, name="draft-watch", daemon=True)
        self._watch.start()

    def check_health(self) -> None:
        """Raise when this replica cannot keep a worker any more and must be replaced."""
        if not self._watch.is_alive():
            raise RuntimeError("the thread that watches the draft worker has ended")
        if not self._directory.is_alive:
            raise RuntimeError("the directory's thread has ended")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy wants to know of this replica, and of the coordinators.

        A worker that refuses requests beside those that it has is full, whatever places it has left: those
        are short of memory. Else it is as full as its places or its memory are, whichever is more: by places
        alone one more would look idle as soon as it has taken what was refused.
        """
        if time.monotonic() < self._full_until_s:
            return {**pool_stats(self._demands), "usage": 1.0}
        shares = self._cluster.draft_shares(self._engine.scheduler.max_num_seqs)
        places = shares.max_sequences or 1
        usage = max(
            self._counters.get("num_sequences", 0.0) / places,
            min(_NEARLY_FULL, self._counters.get("memory_held", 0.0)),
        )
        return {**pool_stats(self._demands), "usage": min(1.0, usage)}

    def wake(self) -> None:
        """Do nothing: a call that waits for a replica makes Serve start one where there is none."""

    def __del__(self) -> None:
        """Called by Serve before the replica ends."""
        if not self._stop.is_set():
            self._close()

    def _start_worker(self) -> None:
        pool = self._cluster.draft_pool
        worker_id = new_peer_id("draft")
        channels = self._cluster.channels
        options = worker_options(pool.bundle, worker_id, self._cluster.namespace)
        shares = self._cluster.draft_shares(self._engine.scheduler.max_num_seqs)
        actor = DraftWorker.options(**options).remote(
            self._engine,
            worker_id,
            bind_host(channels),
            channel_options(channels),
            shares,
            StartReporter(self._cluster.namespace, worker_id),
            rank_options(
                "draft",
                pool.bundle,
                ModelRanks.of_draft(self._engine),
                self._cluster.namespace,
            ),
            channels.tensors,
            pool.rank_silence_s,
            pool.step_timeout_s,
        )
        worker = WorkerHandle(actor, "draft worker")
        self._worker = worker
        address = worker.await_address(pool.load_timeout_s)
        if self._learning is not None:
            self._learning.begin(worker)
        self._num_workers += 1
        self._counters = {}  # of the worker before
        self._worker_id, self._told = worker_id, None
        self._tell_who_may_speak(worker)
        self._announce(
            Member(
                address=address,
                role="draft",
                capacity=shares.max_sequences or 0,
                since=time.time(),
                incarnation=self._num_workers,
                generation=draft_generation(self._engine),
                placement_group=own_placement_group(),
                compile_state=worker.compile_state(),
                tensors=worker.tensor_address(),
                device=worker.device(),
            )
        )
        logger.info("draft worker %s is ready", worker_id)

    def _start_trainer(self, served: PackedVersion | None) -> Any:
        """Start a trainer in this replica's bundle; what it takes of the CPU is in the configuration."""
        trainer_id = new_peer_id("trainer")
        options = worker_options(None, trainer_id, self._cluster.namespace)
        return OnlineTrainerWorker.options(**options).remote(self._engine, trainer_id, served)

    def _follow_learning(self, worker: WorkerHandle, learning: DraftLearning) -> None:
        """Let the worker's draft model learn; announce what has come of it."""
        learning.exchange(worker)
        member, now_s = self._member, time.monotonic()
        if member is None or member.online == learning.status:
            return
        is_news = member.online is None or learning.status is None
        if is_news or now_s >= self._announced_s + _NEWS_S:
            self._announced_s = now_s
            self._announce(msgspec.structs.replace(member, online=learning.status))

    def _announce(self, member: Member) -> None:
        self._member = member
        self._directory.announce(member)

    def _note_counters(self, counters: dict[str, float]) -> None:
        """Keep what a worker counted, and note whether it has refused requests since the last time."""
        before, self._counters = self._counters, counters
        num_refused = sum(counters.get(name, 0.0) - before.get(name, 0.0) for name in _REFUSALS)
        # A worker that has nothing else refuses what is too long for it: no other one would take that.
        if num_refused > 0 and counters.get("num_sequences", 0.0) > 0:
            wait_s = self._cluster.draft_pool.deadlines.max_retry_s
            self._full_until_s = time.monotonic() + _FULL_S + wait_s

    def _follow_compiling(self, worker: WorkerHandle) -> None:
        """Announce what has become of the part of compiling that was left for idle times."""
        member = self._member
        if member is not None and member.compile_state == "pending":
            state = worker.compile_state(timeout_s=self._cluster.membership.lease_s)
            if state != "pending":
                self._announce(msgspec.structs.replace(member, compile_state=state))

    def _follow(self, members: tuple[Member, ...]) -> None:
        """Note who is there. The directory's thread, which renews our lease, never waits for a worker."""
        self._coordinators = [member for member in members if member.role in {"coordinator", "starting"}]
        self._news.set()

    def _tell_who_may_speak(self, worker: WorkerHandle) -> None:
        """Tell the worker, unless it knows.

        Raises:
            TransportError: it is dead, or cannot do as it is told.
        """
        members = self._coordinators
        coordinators = [member.address for member in members]
        targets = [(member.tensors, member.peer_id) for member in members if member.tensors is not None]
        if self._told == (coordinators, targets):
            return
        try:
            worker.call("admit", coordinators, targets)
        except RayTaskError as error:
            raise TransportError(f"the draft worker lets nobody in: {error.cause}") from error
        self._told = coordinators, targets

    def _keep_alive(self) -> None:
        """Look after the worker; replace it when it is dead.

        In vain, this ends, and Serve replaces the replica: another place may have what this one lacks.
        """
        attempts = Attempts(
            most=_MAX_ATTEMPTS,
            first_s=_FIRST_WAIT_S,
            longest_s=_LONGEST_WAIT_S,
            soon_s=max(_SOON_S, _SOON_LOOKS * self._cluster.membership.renew_s),
            forgiven_after_s=_FORGIVEN_AFTER_S,
        )
        attempts.began(time.monotonic())
        while self._wait():
            try:
                assert self._worker is not None
                self._tell_who_may_speak(self._worker)
                self._note_counters(self._health_of(self._worker))
                self._follow_compiling(self._worker)
                if self._learning is not None:
                    self._follow_learning(self._worker, self._learning)
                if self._cluster.draft_pool.autoscaling is not None:
                    # While nobody knows, what was wanted last stands: nobody has become idle by that.
                    demands = read_demands(self._cluster.namespace)
                    self._demands = self._demands if demands is None else demands
            except TransportError as error:
                logger.warning("%s; it is replaced", error)
                if not self._replace_worker(attempts):
                    return

    def _replace_worker(self, attempts: Attempts) -> bool:
        """Start another worker, in several attempts if need be; return whether there is one."""
        wait_s = attempts.lost(time.monotonic())
        self._retire_worker()
        while not attempts.are_in_vain:
            if self._stop.wait(wait_s):
                return False
            try:
                self._start_worker()
            except (DrafthouseError, RayError) as failure:
                self._retire_worker()  # it may run, and nobody has heard of it
                wait_s = attempts.failed(time.monotonic())
                logger.error("no new draft worker, next attempt in %.1f s: %s", wait_s, failure)
            else:
                attempts.began(time.monotonic())
                return True
        logger.error("no draft worker that stays in %d attempts: this place is given up", attempts.num_failed)
        return False

    def _wait(self) -> bool:
        """Wait until the worker is to be looked after, or there is news for it; return whether to go on."""
        self._news.wait(self._cluster.membership.renew_s)
        self._news.clear()
        return not self._stop.is_set()

    def _health_of(self, worker: WorkerHandle) -> dict[str, float]:
        """Return a worker's counters.

        Raises:
            TransportError: it is dead, or says that it serves no more.
        """
        try:
            counters: dict[str, float] = worker.call(
                "check_health", timeout_s=self._cluster.membership.lease_s
            )
        except RayTaskError as error:
            raise TransportError(f"the draft worker serves no more: {error.cause}") from error
        return counters

    def _retire_worker(self) -> None:
        retired, self._worker_id = self._worker_id, None
        if retired is not None:
            self._directory.withdraw(retired)
        self._member = None
        if self._worker is not None:
            self._worker.stop()

    def _close(self) -> None:
        self._stop.set()
        self._news.set()
        if self._learning is not None:
            self._learning.stop()
        self._directory.close()
        if self._worker is not None:
            self._worker.stop()
