"""What is counted of rounds: how many drafts each request was to have, and what drafting them took."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.sequence import SequenceView
from specdec.engine.metrics.engine_metrics import EngineMetrics
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.transport.memory import Faults
from tests.specdec.engine.remote_cluster import Cluster, a_request
from tests.specdec.engine.toy_engines import GREEDY, OracleProposer, request, run, toy_engine

DRAFT_S, WIRE_S = 0.02, 0.003


class _SlowOracle(OracleProposer):
    """Drafts in this process, which takes it its (simulated) time."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        proposals = super().propose(sequences, num_draft_tokens)
        if proposals:
            self._clock.advance(DRAFT_S)
        return proposals


def drafting(metrics: EngineMetrics) -> tuple[float, float]:
    """Return how many rounds are in the histogram of T_draft, and their seconds."""
    values = metrics.snapshot()
    return values["round_drafting_seconds_count"], values["round_drafting_seconds_sum"]


@pytest.mark.parametrize("mode", ["lockstep", "ping_pong", "draft_ahead"])
def test_what_drafting_takes_elsewhere_is_what_draft_workers_say(mode: OverlapMode) -> None:
    cluster = Cluster(Faults(delay_s=(WIRE_S, WIRE_S)), num_drafters=0, mode=mode)
    cluster.start_drafter(DRAFT_S)
    cluster.run([a_request(f"r{index}", random.Random(index)) for index in range(3)])
    num_rounds, seconds = drafting(cluster.engine.metrics())
    assert num_rounds > 5
    assert seconds == pytest.approx(num_rounds * DRAFT_S), "without the wire, and waited for or not"
    busy_s = cluster.proposer.counters["draft_compute_seconds"]
    assert cluster.clock.now_s() < 10.0
    assert cluster.proposer.utilization == pytest.approx(busy_s / cluster.clock.now_s())
    assert cluster.engine.metrics().local_draft_utilization is None


def test_every_draft_worker_has_its_own_share() -> None:
    cluster = Cluster(Faults(delay_s=(WIRE_S, WIRE_S)), num_drafters=0)
    slow, quick = cluster.start_drafter(DRAFT_S), cluster.start_drafter(DRAFT_S / 10)
    cluster.run([a_request(f"r{index}", random.Random(index)) for index in range(6)])
    shares = {link.worker: link.utilization or 0.0 for link in cluster.proposer.links}
    assert 0.0 < 2 * shares[quick] < shares[slow] < 1.0
    assert cluster.clock.now_s() < 10.0
    # Each is counted from when it was known, the mean from the start.
    assert sum(shares.values()) == pytest.approx(2 * cluster.proposer.utilization, rel=0.05)


def test_what_drafting_takes_here_is_what_is_waited_for() -> None:
    clock = ManualClock()
    engine = toy_engine(_SlowOracle(clock), clock=clock)
    run(engine, request("a", (1, 2, 3), GREEDY, seed=1))
    clock.advance(1.0)
    metrics = engine.metrics()
    num_rounds, seconds = drafting(metrics)
    assert num_rounds == metrics.num_drafts > 1
    assert seconds == pytest.approx(num_rounds * DRAFT_S)
    assert metrics.local_draft_utilization == pytest.approx(seconds / clock.now_s())


def test_nobody_knows_what_drafting_takes_that_has_not_answered() -> None:
    cluster = Cluster(Faults(), num_drafters=0)
    cluster.run([a_request("r", random.Random(1))])
    metrics = cluster.engine.metrics()
    assert metrics.num_rounds > 1
    assert drafting(metrics) == (0, 0.0)
    assert cluster.proposer.utilization == 0.0


def test_every_request_of_every_round_is_counted_by_its_k() -> None:
    engine = toy_engine(OracleProposer())
    outputs = run(engine, *(request(name, (1, 2, 3), GREEDY) for name in "abc"))
    metrics = engine.metrics()
    by_k = metrics.num_request_rounds_per_k
    assert sum(by_k) == sum(bool(one.token_ids) for its in outputs.values() for one in its)
    assert sum(k * count for k, count in enumerate(by_k)) == metrics.num_draft_tokens > 0
    assert by_k[0] >= 3, "the rounds of the first tokens"
    values = metrics.snapshot()
    assert [values[f'speculation_request_rounds{{k="{k}"}}'] for k in range(len(by_k))] == by_k


def test_a_k_between_others_has_been_counted_never() -> None:
    metrics = EngineMetrics()
    metrics.count_choices([3, 3, 1], 2)
    metrics.count_choices([], 4)
    assert metrics.num_request_rounds_per_k == [6, 1, 0, 2]
