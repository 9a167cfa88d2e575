"""The directory as a Ray actor, and the thread with which a process keeps in touch with it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.directory import (
    Desertion,
    DirectorySnapshot,
    DirectoryState,
    DirectoryVersion,
    DirectoryView,
    Member,
    Reports,
)
from specdec.transport.base import PeerId

logger = logging.getLogger(__name__)

DIRECTORY_NAME = "drafthouse-directory"
_CALL_TIMEOUT_S = 5.0
_START_REPORT_S = 15.0
"""A worker that has not told how far its start is for so long is assumed not to be at it any more."""
_MIN_QUIET_S = 60.0
"""A directory that nobody has called for so long, at least, ends itself."""
_HEAD_NODE = "node:__internal_head__"
"""A resource that Ray gives to the head node alone; Serve's controller has its place by it."""
_LOOKS_PER_QUIET = 20


class DirectoryProcess:
    """A `DirectoryState` that others call.

    It outlives every version of the deployment, and Ray restarts it whenever it dies. So that it does not
    stay when the application has been deleted (which Serve does without telling it), it ends itself, for
    good, when nobody has renewed anything for ten leases, and for a minute at least.
    """

    def __init__(self, lease_s: float, min_quiet_s: float = _MIN_QUIET_S) -> None:
        """`lease_s`: of those that call `exchange`, which does not say it."""
        self._lease_s = lease_s
        self._state = DirectoryState(lease_s=lease_s, incarnation=time.time_ns())
        self._starts: Reports[str] = Reports(forget_after_s=_START_REPORT_S)
        self._demands: Reports[Any] = Reports(forget_after_s=lease_s)
        self._wanted: dict[str, int] = {}
        self._application = ""
        look_s = min_quiet_s / _LOOKS_PER_QUIET
        self._desertion = Desertion(look_s=look_s, min_quiet_s=min_quiet_s)
        self._desertion.hear(lease_s)
        threading.Thread(target=self._look, args=(look_s,), name="desertion", daemon=True).start()

    def renew(
        self, member: Member | None, known: DirectoryVersion | None, lease_s: float
    ) -> DirectorySnapshot | None:
        """Announce a member (if given) for so long; return a snapshot unless the caller knows it already."""
        now_s = time.monotonic()
        self._desertion.hear(lease_s)
        self._demands.keep_for(lease_s)
        if member is not None:
            self._state.announce(member, now_s, lease_s)
        snapshot = self._state.snapshot(now_s)
        return None if snapshot.version == known else snapshot

    def exchange(self, member: Member | None, known: DirectoryVersion | None) -> DirectorySnapshot | None:
        """As `renew`, with the lease that this directory was made with.

        For those that only look, and for processes of versions that knew no other lease.
        """
        return self.renew(member, known, self._lease_s)

    def end_if_deserted(self) -> None:
        """End for good unless somebody has called meanwhile: those that were waiting have had their turn."""
        if self._desertion.is_complete:
            logger.info("nobody calls the directory any more; it ends")
            _kill(ray.get_runtime_context().current_actor)

    def _look(self, look_s: float) -> None:
        """Look after callers, in a thread of its own: nothing else runs where nobody calls.

        It ends nothing itself: a call of its own waits behind those of others that have arrived.
        """
        while True:
            time.sleep(look_s)
            if self._desertion.look():
                ray.get_runtime_context().current_actor.end_if_deserted.remote()

    def leave(self, peer_id: PeerId) -> None:
        """Remove a member."""
        self._state.leave(peer_id)

    def belong_to(self, application: str) -> None:
        """Note whose processes these are: the name of their Serve application."""
        self._application = application

    def application(self) -> str:
        """Name of the Serve application; empty while nobody has said it."""
        return self._application

    def report_start(self, worker: PeerId, text: str) -> None:
        """Note what a starting worker does; an empty text says that it has started."""
        self._starts.note(worker, text or None, time.monotonic())

    def start_reports(self) -> tuple[str, ...]:
        """What starting workers do, in alphabetical order."""
        return tuple(sorted(self._starts.current(time.monotonic())))

    def report_demand(self, coordinator: PeerId, demand: Any) -> None:
        """Note what a coordinator wants of the draft pool (`autoscaling.draft_demand`)."""
        self._demands.note(coordinator, demand, time.monotonic())

    def demands(self) -> tuple[Any, ...]:
        """What coordinators want of the draft pool."""
        return self._demands.current(time.monotonic())

    def note_wanted(self, part: str, number: int) -> None:
        """Note how many target groups or draft workers a policy has decided (`autoscaling.wanted`)."""
        self._wanted[part] = number

    def note_woken(self, part: str) -> None:
        """Note that somebody waits for the first target group or draft worker (`autoscaling.waking`).

        Serve starts one for that by itself, and asks no policy until it is there.
        """
        self._wanted[part] = max(1, self._wanted.get(part, 0))

    def wanted(self) -> dict[str, int]:
        """How many there should be, of those parts of which a policy has said so."""
        return dict(self._wanted)


def open_directory(namespace: str, lease_s: float) -> Any:
    """Return a handle to the one directory of a namespace, making it if nobody has."""
    return (
        ray.remote(DirectoryProcess)
        .options(
            name=DIRECTORY_NAME,
            namespace=namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            # Outside the placement group of whoever happens to make it: inside, the directory would end with
            # that replica, and wait for a restart in a group that is no more.
            scheduling_strategy="DEFAULT",
            # With Ray's own state and Serve's controller: any other node would be one more that all have
            # to see, and one that may be scaled away.
            resources={_HEAD_NODE: 0.001},
        )
        .remote(lease_s)
    )


def find_directory(namespace: str) -> Any:
    """Return a handle to the directory of a namespace; None if there is none, or Ray's head does not say."""
    try:
        return ray.get_actor(DIRECTORY_NAME, namespace=namespace)
    except (RayError, ValueError):
        return None


def close_directory(namespace: str) -> None:
    """End the directory of a namespace, if there is one."""
    handle = find_directory(namespace)
    if handle is not None:
        _kill(handle)


def _kill(handle: Any) -> None:
    """End an actor that Ray would restart if it just died."""
    ray.kill(handle, no_restart=True)


def current_members(namespace: str) -> tuple[Member, ...]:
    """Return who is in the directory of a namespace now; nobody, if there is none or it does not answer."""
    try:
        handle: Any = ray.get_actor(DIRECTORY_NAME, namespace=namespace)
        answer = handle.exchange.remote(None, None)
        snapshot: DirectorySnapshot | None = ray.get(answer, timeout=_CALL_TIMEOUT_S)
    except (RayError, ValueError) as error:
        logger.info("nobody is known in %s: %s", namespace, error)
        return ()
    return snapshot.members if snapshot is not None else ()


def application_of(namespace: str) -> str:
    """Return the Serve application that a namespace belongs to; empty if nobody says so."""
    try:
        handle: Any = ray.get_actor(DIRECTORY_NAME, namespace=namespace)
        application: str = ray.get(handle.application.remote(), timeout=_CALL_TIMEOUT_S)
    except (RayError, ValueError, AttributeError) as error:  # the last: a directory of an older version
        logger.info("nobody says whose %s is: %s", namespace, error)
        return ""
    return application


class DirectoryLink:
    """Announces this process's members and reports changes, in a thread of its own.

    `on_change` is called from that thread, first with what the directory says at its first answer. While it
    cannot be reached, the last view stands.
    """

    def __init__(
        self,
        *,
        namespace: str,
        lease_s: float,
        renew_s: float,
        on_change: Callable[[tuple[Member, ...]], None],
        name: str,
        application: str = "",
    ) -> None:
        """`application`: the Serve application that this process is of, for `application_of`."""
        self._namespace = namespace
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._on_change = on_change
        self._view = DirectoryView(lease_s=lease_s)
        self._announced: dict[PeerId, Member] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._handle: Any = None
        self._application = application
        self._told_incarnation = 0
        """The directory that knows the application."""
        self._answered_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"{name}-directory", daemon=True)

    @property
    def members(self) -> tuple[Member, ...]:
        """The cached view."""
        return self._view.members

    @property
    def num_lost_ingresses(self) -> int | None:
        """Ingresses that were gone before they had left, as the directory has said last; None: not yet."""
        return self._view.num_lost_ingresses

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def silent_s(self) -> float:
        """For how long the directory has not answered, or could not be asked (any thread)."""
        return time.monotonic() - self._answered_s

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def announce(self, member: Member) -> None:
        """Keep a member registered from now on (any thread)."""
        with self._lock:
            self._announced[member.peer_id] = member
        self._wake.set()

    def withdraw(self, peer_id: PeerId) -> None:
        """Stop announcing a member and take it out of the directory (any thread)."""
        with self._lock:
            self._announced.pop(peer_id, None)
        self.tell("leave", peer_id)

    def tell(self, method: str, *args: object) -> None:
        """Call a method of the directory and wait for nothing (any thread); what is lost is lost.

        Looking the directory up would wait for Ray's head, who may be away: it is told nothing then.
        """
        handle = self._handle
        if handle is not None:
            getattr(handle, method).remote(*args)

    def close(self) -> None:
        """Withdraw everything and end the thread."""
        with self._lock:
            leaving = list(self._announced)
        for peer_id in leaving:
            self.withdraw(peer_id)
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=_CALL_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping:
            self._wake.clear()
            snapshot = self._exchange()
            # No answer is not the answer that nobody is there.
            is_first = self._view.version is None and snapshot is not None
            if self._view.take(snapshot, time.monotonic()) or is_first:
                try:
                    self._on_change(self._view.members)
                except Exception:  # a border: the thread must go on announcing whatever its user does
                    logger.exception("a change of membership could not be taken in")
            self._wake.wait(self._renew_s)

    def _exchange(self) -> DirectorySnapshot | None:
        with self._lock:
            members: list[Member | None] = [*self._announced.values()]
        snapshot: DirectorySnapshot | None = None
        try:
            if self._handle is None:
                self._handle = open_directory(self._namespace, self._lease_s)
            try:
                for member in members or [None]:
                    snapshot = ray.get(self._renew(member), timeout=_CALL_TIMEOUT_S) or snapshot
            finally:  # without an answer, it may have been heard all the same
                self._take_back(members)
            self._answered_s = time.monotonic()
            if self._application and snapshot is not None:
                self._say_whose(snapshot.version.incarnation)
        except (RayError, ValueError) as error:  # whatever Ray has: the next exchange may succeed
            logger.warning("the directory cannot be reached, the last view stands: %s", error)
            self._handle = None
        return snapshot

    def _renew(self, member: Member | None) -> Any:
        """Call the directory. One of a version that asked for no lease keeps the lease it was made with."""
        renew = getattr(self._handle, "renew", None)
        if renew is None:
            return self._handle.exchange.remote(member, self._view.version)
        return renew.remote(member, self._view.version, self._lease_s)

    def _take_back(self, members: Iterable[Member | None]) -> None:
        """Take those out again that were withdrawn while they were being announced, and so came back."""
        with self._lock:
            late = [one.peer_id for one in members if one is not None and one.peer_id not in self._announced]
        for peer_id in late:
            self.tell("leave", peer_id)

    def _say_whose(self, incarnation: int) -> None:
        if incarnation != self._told_incarnation:
            self._told_incarnation = incarnation
            self.tell("belong_to", self._application)
