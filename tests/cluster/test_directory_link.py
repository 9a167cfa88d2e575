"""The thread that keeps a process in touch with the directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from cluster import directory_actor
from cluster.autoscaling.draft_demand import read_demands
from cluster.directory import DirectorySnapshot, DirectoryVersion, Member
from cluster.directory_actor import DirectoryLink, DirectoryProcess
from cluster.start_reports import StartReporter, read_start_reports
from specdec.transport.base import PeerId
from tests.cluster.draft_members import A, B


@pytest.mark.parametrize("members", [(A,), ()])
def test_no_answer_is_not_the_answer_that_nobody_is_there(
    members: tuple[Member, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A door that took it for that would open before its coordinators serve."""
    snapshot = DirectorySnapshot(version=DirectoryVersion(1, 1), members=members)
    answers: Iterator[DirectorySnapshot | None] = iter([None, None, snapshot, None, None])
    num_asked = 0

    def exchange(link: DirectoryLink) -> DirectorySnapshot | None:
        nonlocal num_asked
        num_asked += 1
        return next(answers, None)

    heard: list[tuple[int, tuple[Member, ...]]] = []
    monkeypatch.setattr(DirectoryLink, "_exchange", exchange)
    link = DirectoryLink(
        namespace="none",
        lease_s=3.0,
        renew_s=0.001,
        on_change=lambda members: heard.append((num_asked, members)),
        name="link",
    )
    link.start()
    until_s = time.monotonic() + 10.0
    while num_asked < 6:
        assert time.monotonic() < until_s
        time.sleep(0.001)
    link.close()
    assert heard == [(3, members)]


@pytest.mark.parametrize(
    "error",
    [
        RayActorError(),
        GetTimeoutError("late"),
        RayTaskError("exchange", "traceback", RuntimeError("a bug")),
        RayError("something that no release before had"),
        ValueError("no such actor"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_ray_says_the_link_goes_on(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has ended announces nobody: everybody else would take this process for dead."""
    snapshot = DirectorySnapshot(version=DirectoryVersion(1, 1), members=(A,))
    answers: Iterator[Exception | DirectorySnapshot] = iter([error, error, snapshot])

    def get(answer: object, timeout: float) -> DirectorySnapshot | None:
        said = next(answers, None)
        if isinstance(said, Exception):
            raise said
        return said

    heard = threading.Event()
    monkeypatch.setattr(directory_actor, "open_directory", lambda namespace, lease_s: MagicMock())
    monkeypatch.setattr(directory_actor.ray, "get", get)
    link = DirectoryLink(
        namespace="none", lease_s=3.0, renew_s=0.001, on_change=lambda members: heard.set(), name="link"
    )
    link.start()
    assert heard.wait(10)
    assert link.is_alive
    link.close()
    assert not link.is_alive


def test_for_how_long_the_directory_has_been_silent_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Exception | None] = [None, GetTimeoutError("late"), GetTimeoutError("late"), None]
    now_s = 100.0

    class Call:
        def remote(self, member: Member | None, version: DirectoryVersion | None) -> None:
            return None

    class Handle:
        exchange = Call()

    def get(answer: None, timeout: float) -> None:
        error = answers.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr("cluster.directory_actor.time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr("cluster.directory_actor.open_directory", lambda namespace, lease_s: Handle())
    monkeypatch.setattr("cluster.directory_actor.ray.get", get)
    link = DirectoryLink(
        namespace="none", lease_s=3.0, renew_s=1.0, on_change=lambda members: None, name="link"
    )
    silent_s = []
    while answers:
        now_s += 2.0
        before = link.silent_s
        link._exchange()
        silent_s.append((before, link.silent_s))
    assert silent_s == [(2.0, 0.0), (2.0, 2.0), (4.0, 4.0), (6.0, 0.0)]


class Recording:
    """A handle of the directory: notes what it is told, and answers with a snapshot of an incarnation."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []
        self.incarnation = 1

    def __getattr__(self, method: str) -> object:
        return SimpleNamespace(remote=lambda *args: self.told.append((method, *args)))

    def get(self, answer: None, timeout: float) -> DirectorySnapshot:
        return DirectorySnapshot(version=DirectoryVersion(self.incarnation, 1), members=())


def test_every_directory_hears_once_whose_processes_these_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """By that an update knows what is only starting, and in no directory yet, for its own."""
    directory = Recording()
    monkeypatch.setattr(directory_actor, "open_directory", lambda namespace, lease_s: directory)
    monkeypatch.setattr(directory_actor.ray, "get", directory.get)
    for application, told in (("app", 2), ("", 0)):
        link = DirectoryLink(
            namespace="n",
            lease_s=3.0,
            renew_s=1.0,
            on_change=lambda members: None,
            name="link",
            application=application,
        )
        for directory.incarnation in (1, 1, 2, 2):
            link._exchange()
        assert directory.told.count(("belong_to", application)) == told


def test_nobody_is_looked_up_to_be_told_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking up waits for Ray's head, a minute long where it is away; who tells must not."""

    def look_up(*_: object, **__: object) -> None:
        raise AssertionError("the head was asked")

    monkeypatch.setattr(directory_actor.ray, "get_actor", look_up)
    monkeypatch.setattr(directory_actor, "open_directory", look_up)
    link = DirectoryLink(namespace="n", lease_s=3.0, renew_s=1.0, on_change=lambda members: None, name="link")
    link.tell("report_demand", "me", 1)
    link._handle = directory = Recording()
    link.tell("report_demand", "me", 2)
    assert directory.told == [("report_demand", "me", 2)]


@pytest.mark.parametrize("error", [GetTimeoutError("the head is away"), ValueError("no such actor")])
def test_a_directory_that_is_not_found_is_none(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(directory_actor.ray, "get_actor", look_up)
    assert directory_actor.find_directory("n") is None
    assert directory_actor.application_of("n") == ""
    assert read_demands("n") is None
    assert read_start_reports("n") == ()
    StartReporter("n", PeerId("worker"))("loading target 5 %")
    directory_actor.close_directory("n")


def test_a_worker_that_tells_how_far_it_is_looks_the_directory_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory, looked_up = Recording(), []

    def look_up(name: str, namespace: str) -> Recording:
        looked_up.append(namespace)
        return directory

    monkeypatch.setattr(directory_actor.ray, "get_actor", look_up)
    report = StartReporter("n", PeerId("worker"))
    for text in ("a", "b", ""):
        report(text)
    assert directory.told == [("report_start", "worker", text) for text in ("a", "b", "")]
    assert looked_up == ["n"]


class Actor:
    """A directory that is called here and now, in place of Ray; `before` is called ahead of each call."""

    def __init__(self, directory: object, *methods: str) -> None:
        self.before: dict[str, Callable[[], None]] = {}
        for method in methods:
            setattr(self, method, SimpleNamespace(remote=self._calling(directory, method)))

    def _calling(self, directory: object, method: str) -> Callable[..., object]:
        def call(*args: object) -> object:
            self.before.pop(method, lambda: None)()
            return getattr(directory, method)(*args)

        return call


def process(
    monkeypatch: pytest.MonkeyPatch, *, lease_s: float, min_quiet_s: float = 600.0
) -> DirectoryProcess:
    with monkeypatch.context() as without_threads:  # which would look after callers
        without_threads.setattr(directory_actor.threading, "Thread", MagicMock())
        return DirectoryProcess(lease_s, min_quiet_s)


def link_to(actor: Actor, monkeypatch: pytest.MonkeyPatch, *, lease_s: float = 30.0) -> DirectoryLink:
    monkeypatch.setattr(directory_actor, "open_directory", lambda namespace, lease_s: actor)
    monkeypatch.setattr(directory_actor.ray, "get", lambda answer, timeout: answer)
    return DirectoryLink(
        namespace="n", lease_s=lease_s, renew_s=10.0, on_change=lambda members: None, name="link"
    )


@pytest.mark.parametrize("methods", [("renew", "leave"), ("exchange", "leave")])
def test_a_link_says_its_lease_to_whoever_understands_it(
    methods: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that the version before has made knows its own alone."""
    now_s = 100.0
    directory = process(monkeypatch, lease_s=6.0)
    monkeypatch.setattr(directory_actor, "time", SimpleNamespace(monotonic=lambda: now_s, time_ns=lambda: 1))
    link = link_to(Actor(directory, *methods), monkeypatch)
    link.announce(A)
    for _ in range(3):
        link._exchange()
        now_s += 3.0
    directory.exchange(None, None)  # somebody else calls: it does not stand still
    now_s += 3.5
    snapshot = directory.exchange(None, None)
    assert snapshot is not None
    assert snapshot.members == ((A,) if "renew" in methods else ())


@pytest.mark.parametrize("is_answered", [True, False])
def test_who_was_withdrawn_while_being_announced_does_not_come_back(
    is_answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be taken for alive for another lease: drafts are waited for, requests are sent to it."""
    directory = process(monkeypatch, lease_s=6.0)
    actor = Actor(directory, "renew", "leave")
    link = link_to(actor, monkeypatch)
    link.announce(A)
    link.announce(B)
    link._exchange()
    if not is_answered:

        def get(answer: object, timeout: float) -> None:
            raise GetTimeoutError("late")

        monkeypatch.setattr(directory_actor.ray, "get", get)
    # The link has copied whom it announces; its `leave` comes before what it says of A.
    actor.before["renew"] = lambda: link.withdraw(A.peer_id)
    link._exchange()
    snapshot = directory.exchange(None, None)
    assert snapshot is not None
    assert snapshot.members == (B,)


def test_one_that_is_waited_for_is_wanted_unless_a_policy_wants_more(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = process(monkeypatch, lease_s=6.0)
    directory.note_wanted("target", 3)
    directory.note_wanted("draft", 0)
    for part in ("target", "draft", "another"):
        directory.note_woken(part)
    assert directory.wanted() == {"target": 3, "draft": 1, "another": 1}
    directory.note_wanted("draft", 0)
    assert directory.wanted()["draft"] == 0, "the policy has decided since"


def test_a_directory_that_nobody_calls_ends_itself_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve delete` does not tell it, and Ray would restart it if it just died."""
    directory = process(monkeypatch, lease_s=1.0, min_quiet_s=10.0)
    killed: list[tuple[object, bool]] = []
    actor = Actor(directory, "end_if_deserted")
    context = SimpleNamespace(current_actor=actor)
    sleeps: list[float] = []

    class Over(Exception):
        pass

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 15:
            directory.exchange(None, None)
        if killed or len(sleeps) > 1000:
            raise Over

    monkeypatch.setattr(directory_actor.time, "sleep", sleep)
    monkeypatch.setattr(directory_actor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(
        directory_actor.ray, "kill", lambda handle, *, no_restart: killed.append((handle, no_restart))
    )
    with pytest.raises(Over):
        directory._look(0.5)
    assert killed == [(actor, True)]
    assert len(sleeps) == 14 + 20 + 1, "twenty looks after the last call, and the one that found it gone"
    killed.clear()
    actor.before["end_if_deserted"] = lambda: directory.renew(None, None, 1.0)
    actor.end_if_deserted.remote()
    assert killed == [], "a call that had waited came first"


@pytest.mark.parametrize("error", [RayActorError(), OutOfMemoryError("killed by the memory monitor")])
def test_nobody_is_known_where_the_directory_has_died(
    error: RayError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_actor.ray, "get_actor", MagicMock())
    monkeypatch.setattr(directory_actor.ray, "get", MagicMock(side_effect=error))
    assert directory_actor.current_members("n") == ()
