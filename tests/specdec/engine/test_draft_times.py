"""What drafting takes, from asking to the answer, as the controller is told."""

from __future__ import annotations

import pytest

from specdec.core.request import Request
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.rounds.timed_controller import TimedController
from specdec.scheduling.speculation.controller import FixedController, RoundObservation
from specdec.transport.base import PeerId
from specdec.transport.memory import Faults
from tests.specdec.engine.draft_pool.scripted_worker import scripted
from tests.specdec.engine.draft_pool.wanted_drafts import budgets, sequence, wish
from tests.specdec.engine.remote_cluster import CAPABILITIES, VOCAB, Cluster, a_request

BUSY_S, WIRE_S = 0.02, 0.003
ROUND_TRIP_S = BUSY_S + 2 * WIRE_S


def cluster_of(*busy_s: float) -> Cluster:
    cluster = Cluster(Faults(delay_s=(WIRE_S, WIRE_S)), num_drafters=0)
    for its in busy_s:
        cluster.start_drafter(its)
    return cluster


def test_it_is_the_work_with_its_wire() -> None:
    cluster = cluster_of(BUSY_S)
    one = sequence("a")
    assert cluster.proposer.ready_s is None
    assert cluster.proposer.propose([one], budgets(one))
    assert cluster.proposer.ready_s == pytest.approx(ROUND_TRIP_S)


def test_it_is_that_of_the_slowest_of_several_workers() -> None:
    cluster = cluster_of(BUSY_S, 3 * BUSY_S)
    sequences = [sequence("a"), sequence("b")]
    assert len(cluster.proposer.propose(sequences, budgets(*sequences))) == 2
    assert cluster.proposer.ready_s is not None
    assert cluster.proposer.ready_s >= 3 * BUSY_S + 2 * WIRE_S - 1e-9


def test_what_lay_before_it_at_a_shared_worker_counts() -> None:
    cluster = cluster_of(BUSY_S)
    (name,) = cluster.drafters
    channel = cluster.network.open(PeerId("other"))
    cluster.network._channels[name].admit([cluster.proposer._channel.address, channel.address])
    other = RemoteProposer(channel, capabilities=CAPABILITIES, vocab_size=VOCAB, clock=cluster.clock)
    other.set_workers([cluster.addresses[name]])
    mine, theirs = sequence("mine"), sequence("theirs")
    cluster.proposer.propose([mine], budgets(mine))
    other.propose([theirs], {})  # does not wait for it
    cluster.network.run_for(0.001)
    mine.commit((1,))
    assert cluster.proposer.propose([mine], budgets(mine))
    assert cluster.proposer.ready_s == pytest.approx(ROUND_TRIP_S + BUSY_S - 0.001, abs=1e-6)


def test_ahead_it_ends_when_the_answer_came_not_when_it_was_read() -> None:
    cluster = cluster_of(BUSY_S)
    one = sequence("a")
    assert cluster.proposer.propose([one], budgets(one))
    for _ in range(3):
        cluster.proposer.look_ahead([wish(one)])
        cluster.network.run_for(0.5)  # the target's part of the round
        one.commit((1, 7))
        cluster.proposer.propose([one], budgets(one))
        assert cluster.proposer.ready_s == pytest.approx(ROUND_TRIP_S, abs=1e-4)


def test_ahead_and_waited_for_it_is_the_whole_time() -> None:
    cluster = cluster_of(BUSY_S)
    one = sequence("a")
    assert cluster.proposer.propose([one], budgets(one))
    cluster.proposer.look_ahead([wish(one)])
    cluster.clock.advance(0.001)
    one.commit((1, 7))
    cluster.proposer.propose([one], budgets(one))
    assert cluster.proposer.ready_s == pytest.approx(ROUND_TRIP_S, abs=1e-4)


def test_it_is_not_known_where_nobody_was_asked_or_somebody_is_late() -> None:
    cluster, worker, proposer = scripted({})
    one = sequence("a")
    assert proposer.propose([one], budgets(one))
    assert proposer.ready_s is not None
    assert proposer.propose([], {}) == {}
    assert proposer.ready_s is None
    worker.replies = []
    assert proposer.propose([one], budgets(one)) == {}
    assert cluster.clock.now_s() >= 0.05
    assert proposer.ready_s is None


class _Listener(FixedController):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(3, "ping_pong")
        self.heard: list[RoundObservation] = []

    def observe(self, observation: RoundObservation) -> None:
        self.heard.append(observation)


def test_each_flight_is_told_its_own_time() -> None:
    """In ping_pong the next flight's drafts are there before this one is observed."""
    import random

    cluster = cluster_of(BUSY_S)
    listener = _Listener()
    cluster.engine._rounds._controller = TimedController(listener, cluster.clock)
    (drafter,) = cluster.drafters.values()
    requests: list[Request] = [a_request(f"r{index}", random.Random(index)) for index in range(4)]
    asked: list[float] = []
    propose = drafter.propose

    def slower_each_time(*arguments: object) -> object:
        drafter.busy_s = BUSY_S * (1 + len(asked) % 2)
        asked.append(drafter.busy_s)
        return propose(*arguments)  # type: ignore[arg-type]

    drafter.propose = slower_each_time  # type: ignore[assignment,method-assign]
    cluster.run(requests)
    waited = [(one.draft_s, one.draft_ready_s) for one in listener.heard if any(one.budgets.values())]
    assert len({round(draft_s, 4) for draft_s, _ in waited}) > 1
    assert all(ready_s is None or ready_s == pytest.approx(draft_s, abs=1e-4) for draft_s, ready_s in waited)
    assert sum(ready_s is not None for _, ready_s in waited) > 3
