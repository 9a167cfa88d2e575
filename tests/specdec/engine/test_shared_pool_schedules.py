"""Several coordinators share draft workers behind a bad network: each writes what its model alone would.

Their requests have the same names and other texts: who mixed them up would be seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from specdec.core.ids import RequestId
from specdec.core.request import Request
from tests.pairwise import mostly_full
from tests.specdec.engine.random_schedules import MODES, assert_nothing_is_left, random_faults
from tests.specdec.engine.remote_cluster import Cluster, a_request, expected

_BLOCK = 10


@dataclass(slots=True)
class Coordinator:
    """One of them, its requests and what came of them."""

    cluster: Cluster
    requests: list[Request]
    waiting: list[Request] = field(default_factory=list)
    tokens: dict[RequestId, list[int]] = field(default_factory=dict)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self.cluster.engine.has_work

    def step(self, rng: random.Random) -> None:
        if self.waiting and (rng.random() < 0.3 or not self.cluster.engine.has_work):
            self.cluster.engine.add_request(self.waiting.pop())
        self.cluster.step(self.tokens)


def run_schedule(seed: int) -> tuple[list[Coordinator], int]:
    """Run coordinators in any order through faults; return them and how often a draft worker died."""
    rng = random.Random(seed)
    first = Cluster(
        random_faults(rng),
        seed,
        num_drafters=rng.randint(1, 3),
        num_blocks=rng.choice([14, 24, 64]),
        mode=rng.choice(MODES),
    )
    clusters = [first]
    for _ in range(rng.randint(1, 2)):
        faults = first.network.faults
        clusters.append(Cluster(faults, num_drafters=0, mode=rng.choice(MODES), first=first))
    coordinators = []
    for cluster in clusters:
        requests = [a_request(f"r{index}", rng) for index in range(4)]
        tokens: dict[RequestId, list[int]] = {one.request_id: [] for one in requests}
        coordinators.append(Coordinator(cluster, requests, list(requests), tokens))
    num_deaths = 0
    while working := [one for one in coordinators if one.has_work]:
        fate = rng.random()
        if fate < 0.05 and first.drafters:
            first.stop_drafter(rng.choice(list(first.drafters)), told=rng.random() < 0.5)
            num_deaths += 1
        elif fate < 0.1:
            first.start_drafter(busy_s=rng.choice([0.0, 0.02, 0.3]))
        elif fate < 0.15:
            first.network.faults = random_faults(rng)
        rng.choice(working).step(rng)
    for one in coordinators:
        for request in one.requests:
            assert one.tokens[request.request_id] == expected(request), (seed, request)
    return coordinators, num_deaths


@pytest.mark.cover(1)
@pytest.mark.parametrize("block", mostly_full(range(40), [0, 1]))
def test_no_coordinator_gets_what_is_anothers(block: int) -> None:
    num_deaths = num_drafted = 0
    num_accepted = [0, 0, 0]
    for seed in range(_BLOCK * block, _BLOCK * (block + 1)):
        coordinators, died = run_schedule(seed)
        num_deaths += died
        for place, one in enumerate(coordinators):
            metrics = one.cluster.engine.metrics()
            num_accepted[place] += metrics.num_accepted_tokens
            num_drafted += metrics.num_draft_tokens
        for one in coordinators:
            assert_nothing_is_left(one.cluster)
    assert num_deaths > 5
    assert min(num_accepted) > 20
    assert sum(num_accepted) > 0.2 * num_drafted


def test_control_texts_of_requests_of_one_name_differ() -> None:
    """Negative control: the drafts of one coordinator would not do for another one's request."""
    coordinators, _ = run_schedule(3)
    one, other = (its.requests[0] for its in coordinators[:2])
    assert one.request_id == other.request_id
    assert expected(one) != expected(other)
