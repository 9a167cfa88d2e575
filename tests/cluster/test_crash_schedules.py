"""Requests that kill who serves them, however they do it, and those that were only there; simulated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec
import pytest

from cluster.crash_policy import MAX_CLEARED, MAX_CRASHES
from specdec.core.error_codes import COORDINATOR_FAILED, FAILED_REPEATEDLY
from specdec.core.ids import RequestId
from specdec.core.outputs import RequestOutput
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.transport.base import Envelope, PeerLost
from specdec.transport.memory import Faults
from tests.cluster.simulation import (
    LEASE_S,
    ROUND_S,
    SimCoordinator,
    SimIngress,
    Simulation,
    a_request,
    assert_right,
    simple,
)

Kind = Literal["target", "device", "coordinator"]
"""target: that is lost; device: and no other can be loaded in this place; coordinator: the whole process."""


class Killer:
    """Lets some requests kill who serves them, as soon as they have had `after` tokens there."""

    def __init__(
        self, sim: Simulation, names: Collection[str], kinds: Iterable[Kind], after: int = 0
    ) -> None:
        self._sim = sim
        self._names = names
        self._kinds = iter(kinds)
        self._after = after
        self._doomed: set[SimCoordinator] = set()
        self.num_deaths = 0
        sim.killer = self.look

    def look(self, coordinator: SimCoordinator) -> None:
        if coordinator in self._doomed or not any(self._kills(coordinator, name) for name in self._names):
            return
        self.num_deaths += 1
        kind = next(self._kinds)
        if kind == "coordinator":
            self._doomed.add(coordinator)
            self._sim.network.schedule(ROUND_S / 2, lambda: self._crash(coordinator))
        else:
            coordinator.is_hopeless = kind == "device"
            coordinator.lose_target()

    def _kills(self, coordinator: SimCoordinator, name: str) -> bool:
        live = coordinator.engine._roster.running.get(RequestId(name))
        if live is None or name not in coordinator.toy.known_requests:
            return False
        return live.sequence.num_generated - len(live.request.delivered_token_ids) >= self._after

    def _crash(self, coordinator: SimCoordinator) -> None:
        self._sim.crash(coordinator, told_after_s=1.0)
        self._sim.start_coordinator()


def some_requests(count: int, max_tokens: int = 60) -> list[Request]:
    return [a_request(f"r{index}", random.Random(index), max_tokens) for index in range(count)]


def a_long_request(name: str, max_tokens: int = 170) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True),
        seed=5,
        num_draft_tokens=0,
    )


def code_of(ingress: SimIngress, name: str) -> str | None:
    last = ingress.last[RequestId(name)]
    assert isinstance(last, RequestOutput), last
    return last.error_code


def assert_third_death_is_the_last(num_coordinators: int, kinds: Iterable[Kind]) -> None:
    """Let one of six requests kill whoever runs it: it is ended after the third, and the others are right."""
    sim, ingress = simple(num_coordinators)
    requests = some_requests(6)
    killer = Killer(sim, ["r2"], kinds)
    for request in requests:
        ingress.open(request)
    sim.run_until_done()
    assert code_of(ingress, "r2") == FAILED_REPEATEDLY
    assert killer.num_deaths == 3
    assert_right(ingress, requests[:2] + requests[3:])


@pytest.mark.parametrize("num_coordinators", [1, 2])
@pytest.mark.parametrize("kinds", list(itertools.product(["target", "coordinator"], repeat=3)), ids="-".join)
def test_who_kills_now_this_and_now_that_does_so_three_times(
    kinds: Sequence[Kind], num_coordinators: int
) -> None:
    assert_third_death_is_the_last(num_coordinators, kinds)


@pytest.mark.parametrize("num_coordinators", [1, 3])
def test_who_breaks_devices_does_so_three_times(num_coordinators: int) -> None:
    """Each group that gives itself up has lost its target to it before."""
    assert_third_death_is_the_last(num_coordinators, itertools.repeat("device"))


def test_planned_ends_of_coordinators_make_nobody_a_suspect() -> None:
    sim, ingress = simple()
    request = a_long_request("r")
    ingress.open(request)
    for _ in range(5):
        sim.network.run_for(0.5)
        (leaving,) = sim.coordinators
        leaving.desk.end_all("the coordinator was shut down", COORDINATOR_FAILED)
        sim.network.run_for(ROUND_S)
        sim.crash(leaving, told_after_s=0.1)
        sim.start_coordinator()
        (stream,) = ingress.book._streams.values()
        sim.network.run_for(0.2)
        assert not stream.suspected_for
    sim.run_until_done()
    assert_right(ingress, [request])


@pytest.mark.parametrize("kind", ["target", "coordinator"])
def test_who_kills_only_after_it_was_cleared_is_cleared_twice(kind: Kind) -> None:
    sim, ingress = simple(2)
    poison, innocent = a_long_request("poison"), a_request("innocent", random.Random(1), 60)
    killer = Killer(sim, ["poison"], itertools.repeat(kind), after=20)
    for request in (poison, innocent):
        ingress.open(request)
    sim.run_until_done()
    assert code_of(ingress, "poison") == FAILED_REPEATEDLY
    assert killer.num_deaths == MAX_CRASHES * (MAX_CLEARED + 1) + 1
    assert_right(ingress, [innocent])


@pytest.mark.parametrize(
    ("response", "num_deaths"),
    [("cmpl-ab-{}", range(3, 8)), ("r{}", [9])],
    ids=["of one response", "of none in common"],
)
def test_choices_share_what_they_are_suspected_for(response: str, num_deaths: Collection[int]) -> None:
    """Each is at a group of its own; as soon as one has failed, the door gives its response up."""
    sim, ingress = simple(3)
    names = [response.format(index) for index in range(3)]
    killer = Killer(sim, names, itertools.repeat("coordinator"))
    for name in names:
        ingress.open(a_long_request(name))
    while ingress.book.num_streams:
        assert killer.num_deaths < 20
        sim.network.run_for(ROUND_S)
        if ingress.last and response.startswith("cmpl"):
            for name in names:
                ingress.book.close(RequestId(name))
    assert {code_of(ingress, name) for name in ingress.last} == {FAILED_REPEATEDLY}
    assert killer.num_deaths in num_deaths


def test_links_that_break_three_times_end_nobody() -> None:
    sim, ingress = simple(2)
    requests = [a_long_request(f"r{index}") for index in range(4)]
    for request in requests:
        ingress.open(request)
    for _ in range(3):
        sim.network.run_for(0.3)
        for coordinator in sim.coordinators:
            ingress.book.hear(Envelope(sender=coordinator.member.peer_id, message=PeerLost()))
        assert any(stream.suspected_for for stream in ingress.book._streams.values())
        sim.network.run_for(1.0)
        assert not any(stream.suspected_for for stream in ingress.book._streams.values())
    sim.run_until_done()
    assert_right(ingress, requests)
    assert not ingress.book._silent


def test_a_network_that_is_gone_for_longer_than_a_lease_three_times_ends_nobody() -> None:
    sim, ingress = simple(1)
    request = a_long_request("r")
    ingress.open(request)
    for _ in range(3):
        sim.network.run_for(0.3)
        sim.network.faults = Faults(loss=1.0)
        sim.network.run_for(2 * LEASE_S)
        sim.network.faults = Faults()
        sim.network.run_for(0.7)
    sim.run_until_done()
    assert_right(ingress, [request])


@pytest.mark.parametrize("kind", ["target", "coordinator"])
def test_those_that_wait_are_not_suspected(kind: Kind) -> None:
    sim, ingress = simple()
    requests = some_requests(12, max_tokens=100)
    for request in requests:
        ingress.open(request)
    begun: set[RequestId] = set()
    for _ in range(2):
        sim.network.run_for(0.3)
        (coordinator,) = sim.coordinators
        begun |= coordinator.engine._roster.running.keys()
        if kind == "target":
            coordinator.lose_target()
        else:
            sim.crash(coordinator, told_after_s=0.5)
            sim.start_coordinator()
        sim.network.run_for(0.7)
    assert len(begun) < len(requests)
    suspected = {r for r, stream in ingress.book._streams.items() if stream.suspected_for}
    assert suspected
    assert suspected <= begun
    sim.run_until_done()
    assert_right(ingress, requests)


@pytest.mark.parametrize("kind", ["target", "coordinator"])
def test_one_that_waited_and_kills_while_its_prompt_is_read_is_counted(kind: Kind) -> None:
    sim, ingress = simple()
    requests = some_requests(8)
    long = tuple(random.Random(3).choices(range(9), k=100))
    requests[7] = msgspec.structs.replace(requests[7], prompt_token_ids=long)
    killer = Killer(sim, ["r7"], itertools.repeat(kind))
    for request in requests:
        ingress.open(request)
    sim.run_until_done()
    assert code_of(ingress, "r7") == FAILED_REPEATEDLY
    assert not ingress.tokens[RequestId("r7")]
    assert killer.num_deaths == 3
    assert_right(ingress, requests[:7])
