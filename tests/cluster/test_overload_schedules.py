"""Ingress and coordinators when there is too much to do, or nobody there to do it; a simulated network."""

from __future__ import annotations

import random

import msgspec
import pytest

from cluster.stream_book import StreamBook
from specdec.core.errors import CapacityError, LateError, NotReadyError
from specdec.core.outputs import RequestOutput
from specdec.core.request import LatencyTarget, Request
from tests.cluster.simulation import LEASE_S, ROUND_S, a_request, assert_right, simple


def test_a_request_that_had_to_leave_a_full_queue_is_refused() -> None:
    sim, ingress = simple(max_num_waiting=2)
    many = [owned_request(f"many{index}", "a") for index in range(6)]
    for request in many:
        ingress.open(request)
    sim.network.run_for(2 * ROUND_S)
    single = owned_request("single", "b")
    ingress.open(single)
    sim.run_until_done()
    refused = [r for r in many if isinstance(ingress.last[r.request_id], CapacityError)]
    assert [r.request_id for r in refused] == ["many5"]
    assert_right(ingress, [single, *(r for r in many if r not in refused)])


def test_a_request_that_had_to_leave_a_full_queue_goes_to_another() -> None:
    sim, ingress = simple(max_num_waiting=2)
    many = [owned_request(f"many{index}", "a") for index in range(6)]
    for request in many:
        ingress.open(request)
    sim.network.run_for(2 * ROUND_S)
    other = sim.start_ingress("other")
    sim.network.run_for(2 * ROUND_S)
    single = owned_request("single", "b")
    other.open(single)  # it knows of one coordinator only
    sim.start_coordinator()
    sim.run_until_done()
    assert_right(other, [single])
    assert_right(ingress, many)


def test_what_waited_at_a_lost_group_is_served_though_newcomers_never_cease() -> None:
    """They would take each place that becomes free before it asks again."""
    sim, ingress = simple(max_num_waiting=4)
    sim.start_coordinator(max_num_waiting=4)
    sim.network.run_for(1.0)
    first = [a_request(f"first{index}", random.Random(index), 60) for index in range(16)]
    for request in first:
        ingress.open(request)
    sim.network.run_for(4 * ROUND_S)
    waiting = [
        request
        for request in first
        if request.request_id not in ingress.last and not ingress.tokens[request.request_id]
    ]
    sim.crash(sim.coordinators[0], told_after_s=0.0)
    num_refused = 0
    for index in range(int(60.0 / ROUND_S)):
        try:
            ingress.open(a_request(f"new{index}", random.Random(index), 60))
        except CapacityError:
            num_refused += 1
        sim.network.run_for(ROUND_S)
        if all(request.request_id in ingress.last for request in waiting):
            break
    assert len(waiting) > 4
    assert_right(ingress, waiting)


def owned_request(name: str, owner: str) -> Request:
    """Return a request of an owner."""
    return msgspec.structs.replace(a_request(name, random.Random(1), 60), owner=owner)


def test_who_would_be_late_everywhere_is_told_so() -> None:
    sim, ingress = simple()
    for index in range(40):
        ingress.open(a_request(f"r{index}", random.Random(index), max_tokens=30))
    sim.network.run_for(3.0)
    in_time = msgspec.structs.replace(a_request("in time", random.Random(1)), timeout_s=1000.0)
    hurried = msgspec.structs.replace(
        a_request("hurried", random.Random(2)), slo=LatencyTarget(ttft_ms=100.0)
    )
    ingress.open(in_time)
    ingress.open(hurried)
    sim.run_until_done()
    refusal = ingress.last[hurried.request_id]
    assert isinstance(refusal, LateError)
    assert refusal.retry_after_s >= 1.0
    assert_right(ingress, [in_time])


def test_where_there_may_be_nobody_streams_wait_for_who_is_started_for_them() -> None:
    sim, ingress = simple()
    send = ingress.channel.send
    ingress.book = StreamBook(send, sim.clock, lease_s=LEASE_S, failover_timeout_s=60.0, may_be_none=True)
    sim.tell()
    sim.network.run_for(1.0)
    described = ingress.book.description
    assert described is not None
    sim.crash(sim.coordinators[0], told_after_s=0.0)
    sim.network.run_for(1.0)
    assert ingress.book.is_deserted
    assert ingress.book.description == described, "requests are taken in"
    waiting, hopeless = a_request("waiting", random.Random(1)), a_request("hopeless", random.Random(2))
    ingress.open(waiting)
    assert ingress.book.has_homeless
    sim.network.run_for(20.0)
    sim.start_coordinator()
    sim.run_until_done()
    assert_right(ingress, [waiting])
    assert not ingress.book.has_homeless
    sim.crash(sim.coordinators[0], told_after_s=0.0)
    sim.network.run_for(1.0)
    ingress.open(hopeless)
    sim.network.run_for(62.0)
    assert isinstance(ingress.last[hopeless.request_id], NotReadyError)


def test_elsewhere_nobody_there_is_said_at_once() -> None:
    sim, ingress = simple()
    sim.crash(sim.coordinators[0], told_after_s=0.0)
    sim.network.run_for(1.0)
    assert ingress.book.description is not None, "it may be back in a moment"
    early = a_request("early", random.Random(1))
    ingress.open(early)
    assert early.request_id not in ingress.last
    sim.network.run_for(LEASE_S)
    assert isinstance(ingress.last[early.request_id], NotReadyError)
    assert ingress.book.description is None
    with pytest.raises(NotReadyError):
        ingress.open(a_request("r", random.Random(1)))


def test_nobody_is_refused_because_the_only_coordinator_was_late_to_renew_its_lease() -> None:
    sim, ingress = simple()
    sim.network.run_for(1.0)
    (late,) = sim.coordinators
    sim.coordinators.remove(late)
    sim.tell()
    assert ingress.book.is_deserted
    request = a_request("r", random.Random(1))
    ingress.open(request)
    sim.network.run_for(LEASE_S / 2)
    sim.coordinators.append(late)
    sim.tell()
    sim.run_until_done()
    assert_right(ingress, [request])


def test_what_ran_when_its_target_was_lost_is_not_refused_for_being_late() -> None:
    sim, ingress = simple()
    requests = [
        msgspec.structs.replace(
            a_request(f"r{index}", random.Random(index), 60), slo=LatencyTarget(ttft_ms=3000.0)
        )
        for index in range(4)
    ]
    for request in requests:
        ingress.open(request)
    sim.network.run_for(0.5)
    sim.coordinators[0].lose_target()
    sim.run_until_done()
    assert_right(ingress, requests)
    assert all(isinstance(ingress.last[r.request_id], RequestOutput) for r in requests)


def test_what_waited_when_its_coordinator_died_is_not_refused_for_being_late() -> None:
    """Where it goes there is a queue already, and the time to its first token has passed for some."""
    sim, ingress = simple()
    sim.start_coordinator()
    requests = [
        msgspec.structs.replace(
            a_request(f"r{index}", random.Random(index), 60),
            slo=LatencyTarget(ttft_ms=60_000.0),
            timeout_s=900.0,
        )
        for index in range(30)
    ]
    for request in requests[:8]:
        ingress.open(request)
    sim.network.run_for(4.0)  # rates are known now
    for request in requests[8:]:
        ingress.open(msgspec.structs.replace(request, slo=LatencyTarget(ttft_ms=8_000.0)))
    sim.network.run_for(2 * ROUND_S)
    taken = [request for request in requests if request.request_id not in ingress.last]
    assert len(taken) > 12
    sim.crash(sim.coordinators[0], told_after_s=0.0)
    sim.run_until_done()
    assert_right(ingress, taken)


def test_streams_that_have_begun_do_not_wait_behind_newcomers() -> None:
    sim, ingress = simple(max_num_waiting=2)
    sim.start_coordinator(max_num_waiting=2)
    begun = [a_request(f"begun{index}", random.Random(index), 60) for index in range(8)]
    for request in begun:
        ingress.open(request)
    sim.network.run_for(12 * ROUND_S)
    assert all(ingress.tokens[request.request_id] for request in begun)
    newcomers = [a_request(f"new{index}", random.Random(index), 60) for index in range(200)]
    for request in newcomers[:8]:
        ingress.open(request)
    sim.network.run_for(2 * ROUND_S)
    sim.crash(sim.coordinators[0], told_after_s=0.0)
    moved_s = sim.clock.now_s()
    for request in newcomers[8:]:  # there is always somebody who asks
        ingress.open(request)
        sim.network.run_for(ROUND_S)
        if all(one.request_id in ingress.last for one in begun):
            break
    # Two groups' streams one after the other, each of about 60 rounds at most.
    assert sim.clock.now_s() - moved_s < 150 * ROUND_S
    assert_right(ingress, begun)
    sim.run_until_done()
