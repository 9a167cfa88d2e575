"""Whose grammar is compiled next, and who has begun."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from specdec.core.ids import RequestId
from specdec.core.sampling_params import Grammar
from specdec.engine.requests.preparation import Preparation
from specdec.scheduling.fairness import FairTurns
from specdec.scheduling.state import ServiceKey

GRAMMAR: Any = object()


class Compiler:
    """Compiles when it is told to; a future that runs cannot be cancelled."""

    num_threads = 1

    def __init__(self) -> None:
        self.begun: list[Future[Any]] = []
        self.is_closed = False

    def begin(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> Future[Any]:
        future: Future[Any] = Future()
        if not any(one.running() for one in self.begun):
            future.set_running_or_notify_cancel()
        self.begun.append(future)
        return future

    def finish(self) -> None:
        """End what runs, and begin the next that was not cancelled."""
        running = next(one for one in self.begun if one.running())
        running.set_result(object())
        for one in self.begun:
            if not one.done() and not one.cancelled() and one.set_running_or_notify_cancel():
                return


def make() -> tuple[Preparation, Compiler]:
    compiler: Any = Compiler()
    return Preparation(compiler), compiler


class Requests:
    def __init__(self) -> None:
        self._turns = FairTurns()
        self._number = 0

    def of(self, owner: str) -> Any:
        self._number += 1
        name = f"{owner}-{self._number}"
        key = ServiceKey(0, self._turns.take(owner, 100), self._number)
        request = SimpleNamespace(delivered_token_ids=())
        return SimpleNamespace(request_id=RequestId(name), service_key=key, request=request, grammar=None)


def names(lives: Sequence[Any]) -> list[str]:
    return [live.request_id for live in lives]


def test_owners_take_turns_behind_what_is_being_compiled() -> None:
    preparation, compiler = make()
    requests = Requests()
    for live in [*(requests.of("greedy") for _ in range(5)), requests.of("modest")]:
        preparation.add(live, GRAMMAR)
    assert len(preparation) == 6
    assert names(preparation.begun) == ["greedy-1", "greedy-2"], "one for the thread, and one to go on with"
    assert names([preparation.last]) == ["greedy-5"]
    served: list[str] = []
    while len(preparation):
        compiler.finish()
        served += names([live for live, error in preparation.take_ready(0.0) if error is None])
    assert served == ["greedy-1", "greedy-2", "modest-6", "greedy-3", "greedy-4", "greedy-5"]
    assert preparation.last is None


def test_who_leaves_before_it_has_begun_is_never_compiled() -> None:
    preparation, compiler = make()
    requests = Requests()
    lives = [requests.of("one") for _ in range(4)]
    for live in lives:
        preparation.add(live, GRAMMAR)
    removed = [preparation.remove(lives[2].request_id) for _ in range(2)]
    assert removed == [lives[2], None]
    assert preparation.get(lives[2].request_id) is None
    assert preparation.get(lives[3].request_id) is lives[3]
    assert names(list(preparation)) == ["one-1", "one-2", "one-4"]
    assert len(compiler.begun) == 2


def test_a_thread_is_not_free_because_its_request_has_left() -> None:
    """What runs cannot be stopped; what has not begun in its thread can, and makes place."""
    preparation, compiler = make()
    requests = Requests()
    lives = [requests.of("one") for _ in range(5)]
    for live in lives:
        preparation.add(live, GRAMMAR)
    preparation.remove(lives[0].request_id)
    assert names(preparation.begun) == ["one-2"], "its thread is still at work"
    preparation.remove(lives[1].request_id)
    assert names(preparation.begun) == ["one-3"]
    compiler.finish()
    assert preparation.take_ready(0.0) == [], "nobody wants it any more"
    assert names(preparation.begun) == ["one-3", "one-4"]
