"""Draft workers that join, leave, fill up and die: who drafts for whom, and what it costs."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.core.plan import TargetStep
from specdec.core.request import Request
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyTarget
from specdec.proposers.base import Proposer
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.sampling.sampler import Sampler
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.transport.base import PeerId
from specdec.transport.memory import Faults
from tests.pairwise import mostly_full
from tests.specdec.engine.draft_pool.wanted_drafts import budgets, sequence, wish
from tests.specdec.engine.remote_cluster import (
    CAPABILITIES,
    MODEL,
    VOCAB,
    Cluster,
    a_request,
    expected,
    reasons,
)

ROUND_S = 0.02


def shares_of(cluster: Cluster) -> list[int]:
    return sorted(server.num_sequences for server in cluster.servers.values())


def test_full_workers_are_asked_seldom_and_a_place_is_found_when_there_is_one() -> None:
    cluster = Cluster(Faults(), num_drafters=2, shares=DraftShareConfig(max_sequences=3))
    sequences = [sequence(f"s{index}") for index in range(10)]
    proposer = cluster.proposer
    for _ in range(500):
        found = proposer.propose(sequences, budgets(*sequences))
        cluster.network.run_for(ROUND_S)
    assert len(found) == 6, "what has no place goes on without drafts"
    assert shares_of(cluster) == [3, 3]
    refused = proposer.counters["draft_sequences_refused"]
    assert 4 <= refused < 40, "500 rounds, four of ten without a place"
    assert sum(server.counters["refused_entries"] for server in cluster.servers.values()) == refused
    assert proposer.pool_usage == 1.0
    assert reasons(proposer).keys() == {"place"}
    proposer.release([next(iter(found))])
    sequences = [one for one in sequences if one.request_id != next(iter(found))]
    rounds = 0
    while len(proposer.propose(sequences, budgets(*sequences))) < 6:
        cluster.network.run_for(ROUND_S)
        rounds += 1
        assert rounds * ROUND_S < 2.2, "two seconds at most until the next attempt"
    cluster.start_drafter()
    for _ in range(5):
        found = proposer.propose(sequences, budgets(*sequences))
        cluster.network.run_for(ROUND_S)
    assert len(found) == 9
    assert proposer.counters.get("draft_deadline_misses", 0) == 0


def test_a_worker_that_joins_gets_its_part_a_few_at_a_time() -> None:
    cluster = Cluster(Faults(), num_drafters=1, shares=DraftShareConfig(max_sequences=64))
    sequences = [sequence(f"s{index}", prompt=3 + index) for index in range(12)]
    proposer = cluster.proposer
    proposer.propose(sequences, budgets(*sequences))
    cluster.start_drafter()
    moved = [proposer.counters.get("draft_sequences_moved", 0)]
    for number in range(400):
        assert len(proposer.propose(sequences, budgets(*sequences))) == 12, "nobody loses a draft by moving"
        cluster.network.run_for(ROUND_S)
        moved.append(proposer.counters["draft_sequences_moved"])
        assert moved[-1] - moved[-2] <= 4
        assert moved[-1] <= 4 * (1 + number * ROUND_S)
        for one in sequences:
            one.commit((number % VOCAB,))
    assert shares_of(cluster) == [6, 6] or shares_of(cluster) == [5, 7]
    assert moved[-1] in (5, 6)
    youngest = {name.split("/")[1] for name in list(cluster.drafters.values())[1].known}
    assert youngest == {f"s{index}" for index in range(int(moved[-1]))}, "the shortest moved"
    cluster.stop_drafter(next(iter(cluster.drafters)), told=True)
    stayed = proposer.propose(sequences, budgets(*sequences))
    assert stayed.keys() == {RequestId(name) for name in youngest}, "long texts are read meanwhile"
    cluster.network.run_for(ROUND_S)
    assert len(proposer.propose(sequences, budgets(*sequences))) == 12
    assert shares_of(cluster) == [12]


def test_a_worker_whose_link_stands_again_gets_its_part_though_it_was_left_by_all() -> None:
    """It says nothing unasked, and the one that has taken over has room for everybody."""
    cluster = Cluster(Faults(), num_drafters=2)
    sequences = [sequence(f"s{index}") for index in range(8)]
    proposer = cluster.proposer

    def go_on(seconds: float) -> dict[PeerId, int]:
        for _ in range(round(seconds / ROUND_S)):
            proposer.propose(sequences, budgets(*sequences))
            cluster.network.run_for(ROUND_S)
        return Counter(its.worker for its in proposer._registry.registrations.values())

    assert go_on(1.0) == {"draft-1": 4, "draft-2": 4}
    cluster.network.break_link(PeerId("coordinator-draft"), next(iter(cluster.servers)), 3.0)
    assert go_on(2.5) == {"draft-2": 8}
    assert min(go_on(6.0)[PeerId(name)] for name in ("draft-1", "draft-2")) >= 3


def test_what_is_under_way_does_not_move() -> None:
    cluster = Cluster(Faults(delay_s=(0.01, 0.01)), num_drafters=1, shares=DraftShareConfig(max_sequences=64))
    proposer = cluster.proposer
    sequences = [sequence(f"s{index}") for index in range(8)]
    proposer.propose(sequences, budgets(*sequences))
    proposer.look_ahead([wish(one) for one in sequences])
    cluster.start_drafter()
    for one in sequences:
        one.commit((1, 2))
    proposer.propose(sequences, budgets(*sequences))
    assert proposer.counters.get("draft_sequences_moved", 0) == 0, "their branches were awaited"
    proposer.look_ahead([wish(one) for one in sequences])
    assert 0 < proposer.counters["draft_sequences_moved"] <= 4, "between two rounds they may"


@pytest.mark.parametrize("has_newcomers", [False, True])
def test_a_worker_that_joins_gets_its_part_of_what_is_drafted_ahead(has_newcomers: bool) -> None:
    """Rounds ask for nothing themselves, or for newcomers alone: what is to move does between them."""
    cluster = Cluster(Faults(), num_drafters=1, shares=DraftShareConfig(max_sequences=64))
    sequences = [sequence(f"s{index}") for index in range(12)]
    proposer = cluster.proposer
    proposer.propose(sequences, budgets(*sequences))
    proposer.look_ahead([wish(one) for one in sequences])
    cluster.start_drafter()
    for number in range(250):
        for one in sequences:
            one.commit((number % VOCAB,))
        newcomers = [sequence(f"n{number}")] if has_newcomers else []
        here = [*sequences, *newcomers]
        proposer.propose(here, budgets(*here))
        proposer.look_ahead([wish(one) for one in sequences])
        proposer.release([one.request_id for one in newcomers])
        cluster.network.run_for(ROUND_S)
        assert proposer.counters["draft_sequences_moved"] <= 4 * (1 + number * ROUND_S)
    assert shares_of(cluster) in ([6, 6], [5, 7])
    assert proposer.counters["draft_sequences_moved"] in (5, 6)


def test_coordinators_share_two_workers_evenly() -> None:
    """Each sees its own sequences, and of the others' what the workers tell."""
    cluster = Cluster(Faults(), num_drafters=2, shares=DraftShareConfig(max_sequences=64))
    proposers = [cluster.proposer]
    for index in range(3):
        channel = cluster.network.open(PeerId(f"other-{index}"))
        proposers.append(
            RemoteProposer(channel, capabilities=CAPABILITIES, vocab_size=VOCAB, clock=cluster.clock)
        )
    addresses = list(cluster.addresses.values())
    for address in addresses:
        cluster.network._channels[address.peer_id].admit([one._channel.address for one in proposers])
    own = [[sequence(f"s{index}") for index in range(5 + 3 * number)] for number in range(4)]
    for proposer in proposers:
        proposer.set_workers(addresses[:1])
    for round_number in range(400):
        if round_number == 10:
            for proposer in proposers:
                proposer.set_workers(addresses)
        for proposer, sequences in zip(proposers, own, strict=True):
            assert len(proposer.propose(sequences, budgets(*sequences))) == len(sequences)
        cluster.network.run_for(ROUND_S)
    low, high = shares_of(cluster)
    assert low + high == 38
    assert high <= 1.3 * (low + 1)
    assert sum(one.counters["draft_sequences_moved"] for one in proposers) <= 25


def small_drafter(num_blocks: int, max_model_len: int = 256) -> Proposer:
    runner = ToyRunner(MODEL, num_blocks=num_blocks, max_model_len=max_model_len)
    return DraftModelProposer(runner, DraftChoice(sampler=Sampler(), vocab_size=VOCAB))


def test_a_sequence_outgrows_a_worker_and_goes_on_at_a_larger_one_or_without_drafts() -> None:
    cluster = Cluster(Faults(), make_drafter=lambda: small_drafter(17))  # 64 tokens
    proposer = cluster.proposer
    long, short = sequence("long", prompt=30), sequence("short", prompt=4)
    found = proposer.propose([long, short], budgets(long, short))
    assert len(found) == 2
    while len(found) == 2:
        assert long.committed_len < 64
        cluster.network.run_for(ROUND_S)
        long.commit((1, 2, 3, 4))
        found = proposer.propose([long, short], budgets(long, short))
    assert found.keys() == {"short"}
    assert proposer.counters["draft_sequences_outgrown"] == 1
    (server,) = cluster.servers.values()
    num_asked = server.counters["entries"] + server.counters["refused_entries"]
    for _ in range(200):
        cluster.network.run_for(ROUND_S)
        assert proposer.propose([long, short], budgets(long, short)).keys() == {"short"}
    num_asked = server.counters["entries"] + server.counters["refused_entries"] - num_asked
    assert reasons(proposer) == {"memory": 201}
    assert 200 < num_asked <= 203, "the other one in every round, this one every two seconds"
    other = sequence("other", prompt=4)
    found = proposer.propose([other], budgets(other))
    assert len(found) == 1, "who is small still has a place"
    assert proposer.counters.get("draft_sequences_refused", 0) == 0
    cluster.make_drafter = lambda: small_drafter(256)
    cluster.start_drafter()
    found = proposer.propose([long, short, other], budgets(long, short, other))
    assert len(found) == 3
    assert proposer.counters.get("draft_deadline_misses", 0) == 0
    proposer.release([long.request_id])
    assert not proposer._registry._outgrown


@pytest.mark.parametrize("shares", [None, DraftShareConfig(max_sequences=16)], ids=["unlimited", "places"])
def test_one_that_the_memory_has_no_room_for_keeps_nobody_else_from_drafts(
    shares: DraftShareConfig | None,
) -> None:
    cluster = Cluster(Faults(), make_drafter=lambda: small_drafter(17), shares=shares)  # 64 tokens
    proposer = cluster.proposer
    first, long = sequence("first", prompt=30), sequence("long", prompt=40)
    present = [first, long]
    for _ in range(3):
        found = proposer.propose(present, budgets(*present))
        cluster.network.run_for(ROUND_S)
    assert found.keys() == {"first"}
    assert reasons(proposer) == {"memory": 3}
    assert proposer.counters["draft_sequences_outgrown"] == 1
    assert proposer.counters.get("draft_sequences_refused", 0) == 0
    for index in range(2):
        present.append(sequence(f"short{index}", prompt=4))
        for _ in range(2):
            found = proposer.propose(present, budgets(*present))
            cluster.network.run_for(ROUND_S)
        assert found.keys() == {one.request_id for one in present if one is not long}
    proposer.release([long.request_id])
    present = [one for one in present if one is not long] + [sequence("last", prompt=4)]
    for _ in range(2):
        found = proposer.propose(present, budgets(*present))
        cluster.network.run_for(ROUND_S)
    assert found.keys() == {one.request_id for one in present}
    assert not proposer._registry._outgrown


def test_prompts_that_there_is_no_memory_for_are_sent_one_at_a_time() -> None:
    cluster = Cluster(Faults(), make_drafter=lambda: small_drafter(17))  # two of them
    proposer, present = cluster.proposer, [sequence(f"s{index}", prompt=28) for index in range(20)]
    (server,) = cluster.servers.values()

    def drafted_for(num_rounds: int) -> set[RequestId]:
        for _ in range(num_rounds):
            found = proposer.propose(present, budgets(*present))
            cluster.network.run_for(ROUND_S)
        return set(found)

    def num_refused() -> int:
        return server.counters["refused_entries"] + server.counters["outgrown_sequences"]

    first = drafted_for(5)
    assert (len(first), num_refused()) == (2, 18)
    assert drafted_for(500) == first
    assert 5 <= num_refused() - 18 <= 10
    assert reasons(proposer).keys() == {"memory"}
    num_before = num_refused()
    proposer.release(first)
    present = [one for one in present if one.request_id not in first]
    assert len(drafted_for(5)) == 2, "memory that is freed is used at once"
    assert num_refused() - num_before <= 1
    assert len(drafted_for(145)) == 2
    assert num_refused() - num_before <= 4, (
        "in three seconds; some were not in vain, so the first wait is short"
    )
    cluster.make_drafter = lambda: small_drafter(256)
    cluster.start_drafter()
    assert len(drafted_for(3)) == 18


def test_a_sequence_that_one_worker_cannot_read_any_more_goes_on_at_another() -> None:
    cluster = Cluster(Faults(), make_drafter=lambda: small_drafter(64, max_model_len=40))
    proposer = cluster.proposer
    one = sequence("one", prompt=30)
    assert proposer.propose([one], budgets(one))
    cluster.make_drafter = lambda: small_drafter(64, max_model_len=256)
    cluster.start_drafter()
    num_without = 0
    while one.committed_len < 60:
        cluster.network.run_for(ROUND_S)
        one.commit((1, 2))
        num_without += not proposer.propose([one], budgets(one))
    assert num_without <= 1, "the round in which it is read there, at most"
    small, large = cluster.servers.values()
    assert (small.num_sequences, large.num_sequences) == (0, 1)
    assert proposer.counters["draft_sequences_too_long"] == 0


def test_a_sequence_longer_than_the_draft_model_reads_is_asked_for_no_more() -> None:
    """The coordinator need not know that length: workers tell it."""
    cluster = Cluster(Faults(), num_drafters=2, make_drafter=lambda: small_drafter(64, max_model_len=40))
    proposer = cluster.proposer
    long, short = sequence("long", prompt=30), sequence("short", prompt=4)
    assert proposer._capabilities.max_context is None
    while long.committed_len < 60:
        found = proposer.propose([long, short], budgets(long, short))
        assert (long.request_id in found) == (long.committed_len < 40)
        assert short.request_id in found
        cluster.network.run_for(ROUND_S)
        long.commit((1, 2))
    assert shares_of(cluster) == [0, 1], "its place is for others"
    num_entries = sum(server.counters["entries"] for server in cluster.servers.values())
    for _ in range(10):
        proposer.propose([long], budgets(long))
        proposer.look_ahead([wish(long)])
        cluster.network.run_for(ROUND_S)
    assert num_entries == sum(server.counters["entries"] for server in cluster.servers.values())
    much_longer = sequence("much longer", prompt=50)
    assert proposer.propose([much_longer], budgets(much_longer)) == {}


class _BusyTarget(ToyTarget):
    """A target whose rounds take (simulated) time."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(MODEL, num_blocks=64)
        self._clock = clock

    def submit(self, step: TargetStep) -> None:
        self._clock.advance(ROUND_S)
        super().submit(step)


def run_with_kills(
    mode: OverlapMode,
    num_requests: tuple[int, int, int],
    *,
    is_replaced: bool,
    kill_share: float = 0.1,
    num_drafters: int = 3,
    seed: int = 0,
) -> tuple[float, float, float, int]:
    """Serve requests: some before draft workers are killed at random, some meanwhile, some after it.

    Return the tokens per simulated second of each stretch, and how many workers were killed.
    """
    rng = random.Random(seed)
    cluster = Cluster(
        Faults(delay_s=(0.0, 0.001)),
        seed,
        num_drafters=num_drafters,
        mode=mode,
        make_target=_BusyTarget,
        shares=DraftShareConfig(max_sequences=3),
    )
    ends = list(itertools.accumulate(num_requests))
    requests = [a_request(f"r{index}", rng) for index in range(ends[-1])]
    tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    waiting, active = requests[::-1], list[Request]()
    num_killed = 0
    marks = [(0.0, 0)]
    while waiting or cluster.engine.has_work:
        active = [one for one in active if len(tokens[one.request_id]) < (one.params.max_tokens or 0)]
        while waiting and len(active) < 6:
            active.append(waiting.pop())
            cluster.engine.add_request(active[-1])
        if len(marks) <= len(ends) and len(requests) - len(waiting) >= ends[len(marks) - 1]:
            marks.append((cluster.clock.now_s(), sum(map(len, tokens.values()))))
        if len(marks) == 2 and cluster.drafters and rng.random() < kill_share:
            cluster.stop_drafter(rng.choice(list(cluster.drafters)), told=rng.random() < 0.5)
            num_killed += 1
            if is_replaced:
                cluster.network.schedule(rng.uniform(0.1, 1.0), cluster.start_drafter)
        cluster.step(tokens)
    for request in requests:
        assert tokens[request.request_id] == expected(request), request
    rates = [
        (later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in itertools.pairwise(marks)
    ]
    return rates[0], rates[1], rates[2], num_killed


@pytest.mark.parametrize("mode", mostly_full(["lockstep", "ping_pong", "draft_ahead"], ["ping_pong"]))
def test_draft_workers_are_killed_at_random_during_500_requests(mode: OverlapMode) -> None:
    """What the last requests bring is compared with what the same ones bring where nobody was killed."""
    numbers = (150, 500, 300)
    before, during, after, num_killed = run_with_kills(mode, numbers, is_replaced=True)
    _, unharmed, unharmed_after, none = run_with_kills(mode, numbers, is_replaced=True, kill_share=0.0)
    assert num_killed > 60 > none == 0
    assert during < 0.9 * unharmed, "it did not hurt: this proves nothing"
    assert after > 0.95 * unharmed_after, (before, during, after)


def test_without_new_workers_throughput_does_not_recover() -> None:
    """Negative control: the drafts are what makes it fast."""
    before, _, after, num_killed = run_with_kills("lockstep", (50, 50, 50), is_replaced=False)
    assert num_killed == 3
    assert after < 0.8 * before
