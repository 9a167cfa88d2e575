"""What a draft worker and its trainer tell each other, and what happens when that fails; without Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnschedulableError

from cluster import draft_learning
from cluster.draft_learning import DraftLearning
from specdec.core.clock import ManualClock
from specdec.core.errors import TransportError
from specdec.transport.status import OnlineStatus
from workers.online_trainer import PackedVersion, TrainerReport

PATIENCE_S = 600.0


class FakeTrainer:
    """Answers when told to; `answer` is a report or what `ray.get` raises."""

    def __init__(self, began_with: PackedVersion | None) -> None:
        self.began_with = began_with
        self.heard: list[tuple[str, ...]] = []
        self.answer: TrainerReport | Exception | None = None
        self.is_killed = False
        self.exchange = SimpleNamespace(remote=self._exchange)

    def _exchange(self, texts: tuple[str, ...]) -> FakeTrainer:
        self.heard.append(tuple(texts))
        return self


class FakeRay:
    """What the module needs of Ray: a reference is the trainer itself."""

    @staticmethod
    def wait(references: list[FakeTrainer], timeout: float) -> tuple[list[FakeTrainer], list[FakeTrainer]]:
        assert timeout == 0, "the trainer is never waited for"
        ready = [one for one in references if one.answer is not None]
        return ready, [one for one in references if one.answer is None]

    @staticmethod
    def get(reference: FakeTrainer) -> TrainerReport:
        answer, reference.answer = reference.answer, None
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer

    @staticmethod
    def kill(trainer: FakeTrainer, *, no_restart: bool) -> None:
        assert no_restart
        trainer.is_killed = True


class FakeWorker:
    """A draft worker: has texts, takes versions."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.counted: dict[str, int] = {}
        self.version = 0
        self.can_take = True
        self.num_sent = 0
        self.failing: dict[str, Exception] = {}

    def call(self, method: str, *arguments: Any, timeout_s: float = 10.0) -> Any:
        if method in self.failing:
            raise self.failing[method]
        return getattr(self, f"_{method}")(*arguments)

    def _take_texts(self) -> list[str]:
        texts, self.texts = self.texts, []
        return texts

    def _count(self, counts: dict[str, int]) -> None:
        for name, count in counts.items():
            self.counted[name] = self.counted.get(name, 0) + count

    def _can_use_version(self) -> bool:
        return self.can_take

    def _use_version(self, version: PackedVersion) -> bool:
        self.num_sent += 1
        if not self.can_take:
            return False
        self.version = version.number
        return True


class World:
    """A draft worker that learns, under a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.trainers: list[FakeTrainer] = []
        self.start: Callable[[PackedVersion | None], FakeTrainer] = FakeTrainer
        self.worker: Any = FakeWorker()
        self.learning = DraftLearning(self._start_trainer, self.clock, patience_s=PATIENCE_S)
        self.learning.begin(self.worker)

    def _start_trainer(self, served: PackedVersion | None) -> FakeTrainer:
        trainer = self.start(served)
        self.trainers.append(trainer)
        return trainer

    def exchange(self, seconds: float = 1.0) -> None:
        """What the pool's watch does once a second."""
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            self.learning.exchange(self.worker)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(draft_learning, "ray", FakeRay)
    return World()


def report(version: int | None = None, **counts: int) -> TrainerReport:
    packed = None if version is None else PackedVersion(version, b"weights")
    return TrainerReport(packed, counts, OnlineStatus(version=version or 0))


def test_texts_go_to_the_trainer_and_versions_and_counts_to_the_worker(world: World) -> None:
    world.worker.texts = ["one"]
    world.exchange()
    world.worker.texts = ["two"]
    world.exchange()
    (trainer,) = world.trainers
    assert trainer.heard == [("one",)], "it is not asked again before it has answered"
    trainer.answer = report(1, online_training_steps=5)
    world.exchange()
    assert trainer.heard == [("one",), ("two",)]
    assert world.worker.version == 1
    assert world.worker.counted == {"online_training_steps": 5}
    assert world.learning.status == OnlineStatus(version=1)


def test_a_trainer_that_dies_at_its_start_is_not_started_at_every_look(world: World) -> None:
    def dead(served: PackedVersion | None) -> FakeTrainer:
        trainer = FakeTrainer(served)
        trainer.answer = ActorDiedError()
        return trainer

    world.start = dead
    world.exchange(3600)
    # One second, two, four, ... 256, and then five minutes: an hour has a few of these.
    assert len(world.trainers) in range(18, 22)
    assert world.worker.counted["online_trainers_lost"] == len(world.trainers)
    assert all(trainer.is_killed for trainer in world.trainers)


def test_the_next_trainer_goes_on_from_what_is_served_without_the_texts_of_the_last(world: World) -> None:
    world.exchange()
    world.trainers[0].answer = report(3)
    world.worker.texts = ["deadly", "innocent"]
    world.exchange()
    assert world.trainers[0].heard[-1] == ("deadly", "innocent")
    world.trainers[0].answer = ActorDiedError()
    world.worker.texts = ["new"]
    world.exchange(3)
    first, second = world.trainers
    assert first.is_killed
    assert second.began_with is not None
    assert second.began_with.number == 3
    assert second.heard == [("new",)]
    assert world.worker.counted == {"online_trainers_lost": 1, "online_texts_dropped": 2}


def test_a_trainer_that_hangs_is_given_up(world: World) -> None:
    world.exchange(PATIENCE_S)
    assert len(world.trainers) == 1
    world.exchange(10)
    assert len(world.trainers) == 2
    assert world.trainers[0].is_killed
    assert world.worker.counted["online_trainers_lost"] == 1


def test_a_trainer_that_cannot_be_placed_is_lost_like_one_that_died(world: World) -> None:
    world.exchange()
    world.trainers[0].answer = ActorUnschedulableError("its bundle is gone")
    world.exchange(3)
    assert len(world.trainers) == 2


@pytest.mark.parametrize("where", ["start", "take_texts", "count", "can_use_version", "use_version"])
def test_whatever_fails_the_draft_worker_is_left_alone(
    world: World, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    failure = ValueError("this should not have happened")

    def fail(served: PackedVersion | None) -> FakeTrainer:
        raise failure

    if where == "start":
        world.start = fail
    world.exchange()
    for trainer in world.trainers:
        trainer.answer = report(1, online_training_steps=1)
    world.worker.failing = {} if where == "start" else {where: failure}
    with caplog.at_level(logging.ERROR):
        world.exchange(100)
    num_errors = len([one for one in caplog.records if "could not be handed on" in one.message])
    assert num_errors in range(3, 10), "it waits longer each time"
    # It goes on where it was once that is over.
    world.start, world.worker.failing = FakeTrainer, {}
    world.exchange(200)
    assert world.worker.counted["online_errors"] >= num_errors
    assert len(world.trainers) == 1
    world.trainers[0].answer = report(2)
    world.exchange(2)
    assert world.worker.version == 2


def test_a_new_worker_gets_what_is_served_even_if_that_fails_at_first(world: World) -> None:
    world.exchange()
    world.trainers[0].answer = report(4)
    world.exchange()
    successor: Any = FakeWorker()
    successor.failing = {"use_version": ValueError("not yet")}
    world.learning.begin(successor)
    assert successor.version == 0
    successor.failing = {}
    world.worker = successor
    world.exchange(3)
    assert successor.version == 4


def test_a_new_worker_gets_what_is_served_while_learning_pauses(world: World) -> None:
    """Its forward is compiled by then, and the trainer cannot be started."""
    world.exchange()
    world.trainers[0].answer = report(3)
    world.exchange()
    assert world.worker.version == 3
    world.trainers[0].answer = RuntimeError("it has died")
    world.start = refuse
    world.exchange(2)
    world.worker = FakeWorker()
    world.worker.can_take = False
    world.learning.begin(world.worker)
    world.exchange(2)
    assert world.worker.num_sent == 0
    world.worker.can_take = True
    world.exchange()
    assert world.worker.version == 3


def refuse(served: PackedVersion | None) -> FakeTrainer:
    raise RuntimeError("no place for a trainer")


def test_weights_are_sent_once_when_they_can_be_taken(world: World) -> None:
    world.worker.can_take = False
    world.exchange()
    world.trainers[0].answer = report(4)
    world.exchange(100)
    assert (world.worker.num_sent, world.worker.version) == (0, 0)
    world.worker.can_take = True
    world.exchange(100)
    assert (world.worker.num_sent, world.worker.version) == (1, 4)


def test_a_dead_worker_is_its_owner_s_business(world: World) -> None:
    world.worker.failing = {"take_texts": TransportError("the draft worker does not answer")}
    with pytest.raises(TransportError):
        world.exchange()


def test_after_the_end_nothing_is_started(world: World) -> None:
    world.exchange()
    world.learning.stop()
    assert world.trainers[0].is_killed
    world.exchange(10)
    assert len(world.trainers) == 1
    assert world.learning.status is None
