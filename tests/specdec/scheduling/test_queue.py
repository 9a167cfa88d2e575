"""The queue: priority, then arrival; the preempted come back to where they were."""

from __future__ import annotations

import random

import pytest

from specdec.core.ids import RequestId
from specdec.scheduling.queue import WaitingQueue
from tests.specdec.scheduling.simulation import FakeRequest, fake_request


def names(queue: WaitingQueue[FakeRequest]) -> list[str]:
    return [request.request_id for request in queue]


def test_priority_then_arrival() -> None:
    queue: WaitingQueue[FakeRequest] = WaitingQueue()
    queue.push(fake_request("b", 1, arrival=2))
    queue.push(fake_request("urgent", 1, arrival=3, priority=-5))
    queue.push(fake_request("a", 1, arrival=1))
    queue.push(fake_request("patient", 1, arrival=0, priority=1))
    assert names(queue) == ["urgent", "a", "b", "patient"]
    queue.check_integrity()


def test_preempted_request_returns_to_the_head() -> None:
    queue: WaitingQueue[FakeRequest] = WaitingQueue()
    for arrival, name in enumerate("abc"):
        queue.push(fake_request(name, 1, arrival=arrival))
    first = queue.remove(RequestId("a"))
    assert first is not None
    queue.push(fake_request("d", 1, arrival=3))
    queue.push(first)
    assert names(queue) == ["a", "b", "c", "d"]


def test_unknown_requests() -> None:
    queue: WaitingQueue[FakeRequest] = WaitingQueue()
    assert queue.remove(RequestId("x")) is None
    assert queue.get(RequestId("x")) is None
    queue.push(fake_request("x", 1))
    with pytest.raises(AssertionError):
        queue.push(fake_request("x", 1, arrival=1))


def test_random_operations() -> None:
    generator = random.Random(1)
    queue: WaitingQueue[FakeRequest] = WaitingQueue()
    expected: dict[str, FakeRequest] = {}
    for arrival in range(500):
        if expected and generator.random() < 0.45:
            name = generator.choice(sorted(expected))
            assert queue.remove(RequestId(name)) is expected.pop(name)
        else:
            request = fake_request(f"r{arrival}", 1, arrival=arrival, priority=generator.randint(-2, 2))
            queue.push(request)
            expected[request.request_id] = request
        queue.check_integrity()
        assert names(queue) == sorted(expected, key=lambda name: expected[name].service_key)
