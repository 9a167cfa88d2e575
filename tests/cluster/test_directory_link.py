"""The thread that keeps a process in touch with the directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cluster import directory_actor
from cluster.directory import DirectorySnapshot, DirectoryVersion, Member
from cluster.directory_actor import DirectoryLink
from tests.cluster.test_directory import A


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
