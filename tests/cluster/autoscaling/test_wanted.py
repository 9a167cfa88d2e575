"""How many there should be, on its way from the policies to the doors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from cluster.autoscaling import wanted
from cluster.autoscaling.config import DraftScalingConfig, TargetScalingConfig
from cluster.autoscaling.serve_policy import DraftPoolPolicy, TargetGroupPolicy, group_stats
from cluster.autoscaling.wanted import WantedNumbers, WantedTeller, read_wanted, tell_woken
from tests.cluster.autoscaling.serve_context import context


class Method:
    def __init__(self, called: Callable[..., Any]) -> None:
        self.remote = called


class Directory:
    """A handle to the directory, which notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    @property
    def note_wanted(self) -> Method:
        return Method(lambda part, number: self.told.append((part, number)))

    @property
    def note_woken(self) -> Method:
        return Method(lambda part: self.told.append((part, 1)))

    @property
    def wanted(self) -> Method:
        return Method(lambda: dict(self.told))


class OldDirectory:
    """One of a version that knew nothing of this."""


def until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.001)


class Told:
    """A teller under a clock that the test moves."""

    def __init__(self, *directories: object) -> None:
        self.now_s = 1000.0
        self.left = list(directories)
        self.num_looks = 0
        self.teller = WantedTeller("here", "target", find=self.find, clock=lambda: self.now_s)

    def find(self, namespace: str) -> object:
        assert namespace == "here"
        self.num_looks += 1
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def seconds(self, seconds: int, number: int) -> None:
        for _ in range(10 * seconds):
            self.now_s += 0.1
            self.teller.tell(number)
            finding = self.teller._finding
            if finding is not None:
                finding.join(10)


def test_what_changes_is_told_at_once_and_all_else_now_and_then() -> None:
    """Serve asks a policy ten times a second."""
    directory = Directory()
    told = Told(directory)
    told.seconds(1, 2)
    assert directory.told == [("target", 2)]
    told.teller.tell(3)
    told.teller.tell(3)
    assert directory.told[1:] == [("target", 3)]
    told.seconds(50, 3)
    assert 9 <= len(directory.told[2:]) <= 11, "a directory that has begun anew hears of it"
    assert told.num_looks == 1


@pytest.mark.parametrize("nobody", [None, OldDirectory()], ids=["none", "of an older version"])
def test_without_anybody_to_tell_it_is_looked_for_seldom(nobody: object) -> None:
    directory = Directory()
    told = Told(nobody, nobody, directory)
    told.seconds(9, 2)
    assert told.num_looks <= 2
    told.seconds(120, 2)
    assert directory.told, "it is there now"


def test_a_head_that_does_not_answer_holds_up_nobody() -> None:
    """Serve's controller looks after all deployments in the thread that asks policies."""
    is_over = threading.Event()
    teller = WantedTeller("here", "target", find=lambda namespace: is_over.wait(30))
    for number in range(100):
        teller.tell(number)
    assert teller._finding is not None
    assert teller._finding.is_alive()
    is_over.set()


@pytest.mark.parametrize("part", ["target", "draft"])
def test_policies_tell_what_they_decide(part: str) -> None:
    policy: TargetGroupPolicy | DraftPoolPolicy
    if part == "target":
        targets = TargetScalingConfig(max_groups=4, up_after_s=0)
        policy = TargetGroupPolicy(targets.model_dump(), 10, "here")
        report = group_stats({"num_requests_running": 10.0, "num_requests_waiting": 8.0}, round_s=0.01)
    else:
        policy = DraftPoolPolicy(DraftScalingConfig(max_workers=4, up_after_s=0).model_dump(), "here")
        report = {"usage": 0.9, "num_requests": 9.0, "utilization": 0.9, "wait_share": 0.4, "worth": 1.5}
    assert policy._teller is not None
    assert (policy._teller._namespace, policy._teller._part) == ("here", part)
    told: list[int] = []
    policy._teller = SimpleNamespace(tell=told.append)  # type: ignore[assignment]
    number, _ = policy(context({"a": report}, target=1, now_s=1.0, state={}, bounds=(1, 4)))
    assert number > 1
    assert told == [number]


def test_a_door_knows_what_was_decided_last(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory()
    monkeypatch.setattr(wanted, "find_directory", lambda namespace: directory)
    monkeypatch.setattr(wanted.ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(wanted, "_READ_S", 0.001)
    numbers = WantedNumbers("here", {"target": 1, "draft": 2}, follows=["target"])
    assert (numbers.of("target"), numbers.of("draft")) == (1, 2)
    numbers.start()
    directory.told += [("target", 3), ("draft", 7)]
    until(lambda: numbers.of("target") == 3)
    assert numbers.of("draft") == 2, "that is fixed: what an earlier version has decided of it is over"
    directory.told.clear()
    time.sleep(0.01)
    assert numbers.of("target") == 3, "a directory that has begun anew knows nothing yet"
    directory.told.append(("target", 0))
    until(lambda: numbers.of("target") == 0)
    numbers.close()


def test_who_waits_for_the_first_one_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory()
    monkeypatch.setattr(wanted, "find_directory", lambda namespace: {"here": directory}[namespace])
    tell_woken("here", "draft")
    assert directory.told == [("draft", 1)]


@pytest.mark.parametrize("nobody", [None, OldDirectory()], ids=["none", "of an older version"])
def test_nobody_to_tell_stops_nobody(nobody: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wanted, "find_directory", lambda namespace: nobody)
    tell_woken("here", "draft")


@pytest.mark.parametrize("error", [RayActorError(), None])
def test_nobody_who_says_it_is_no_answer(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(answer: object, timeout: float) -> object:
        assert error is not None
        raise error

    directory = OldDirectory() if error is None else Directory()
    monkeypatch.setattr(wanted, "find_directory", lambda namespace: directory)
    monkeypatch.setattr(wanted.ray, "get", get)
    assert read_wanted("here") is None
    monkeypatch.setattr(wanted, "find_directory", lambda namespace: None)
    assert read_wanted("here") is None
