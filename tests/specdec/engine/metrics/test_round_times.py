"""What belongs to rounds, and what of them is neither drafting nor verifying."""

from __future__ import annotations

import random

import pytest

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.core.plan import TargetResult
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyTarget, ToyTokenizer
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.transport.base import PeerId
from specdec.transport.memory import Faults, MemoryChannel
from specdec.transport.messages import Message, ProposeRequest
from tests.specdec.engine.draft_pool.wanted_drafts import budgets, sequence
from tests.specdec.engine.remote_cluster import Cluster, a_request
from tests.specdec.engine.toy_engines import (
    GREEDY,
    MODEL,
    VOCAB_SIZE,
    OracleProposer,
    request,
    toy_engine,
)

VERIFY_S, BETWEEN_S = 0.010, 0.002


class _SlowTarget(ToyTarget):
    def __init__(self, clock: ManualClock) -> None:
        super().__init__(MODEL)
        self._clock = clock

    def collect(self) -> TargetResult:
        self._clock.advance(VERIFY_S)
        return super().collect()


def started() -> tuple[Engine, ManualClock]:
    clock = ManualClock()
    engine = toy_engine(OracleProposer(), target=_SlowTarget(clock), clock=clock)
    engine.add_request(request("a", (1, 2, 3), GREEDY, seed=1))
    return engine, clock


def test_what_is_done_between_rounds_is_coordinator_time() -> None:
    engine, clock = started()
    clock.advance(5.0)  # before the first round there is none to belong to
    engine.step()
    while engine.has_work:
        clock.advance(BETWEEN_S)
        engine.step()
    metrics = engine.metrics()
    num_between = metrics.num_rounds - 1
    assert num_between > 2
    assert metrics.coordinator_s == pytest.approx(num_between * BETWEEN_S)
    assert metrics.round_s == pytest.approx(num_between * BETWEEN_S + metrics.num_rounds * VERIFY_S)


@pytest.mark.parametrize("how", ["done", "aborted"])
def test_time_without_work_belongs_to_no_round(how: str) -> None:
    engine, clock = started()
    engine.step()
    if how == "aborted":
        engine.abort(request("a", (1,), GREEDY).request_id)
    while engine.has_work:
        engine.step()
    clock.advance(3600.0)
    engine.add_request(request("b", (1, 2, 3), GREEDY, seed=1))
    while engine.has_work:
        engine.step()
    metrics = engine.metrics()
    assert metrics.coordinator_s == pytest.approx(0.0)
    assert metrics.round_s == pytest.approx(metrics.num_rounds * VERIFY_S)


ASK_S, BUSY_S, WIRE_S = 0.001, 0.020, 0.003


@pytest.mark.parametrize("mode", ["lockstep", "ping_pong", "draft_ahead"])
def test_asking_draft_workers_is_coordinator_time_and_waiting_for_them_is_not(
    mode: OverlapMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(Faults(delay_s=(WIRE_S, WIRE_S)), num_drafters=0, mode=mode)
    cluster.start_drafter(BUSY_S)
    asked = sent = 0

    def send(channel: MemoryChannel, peer_id: PeerId, message: Message) -> None:
        nonlocal asked, sent
        if isinstance(message, ProposeRequest):
            # What is only to be read is told while the target is at work, and so are wishes.
            is_beside = mode == "draft_ahead" and cluster.engine._rounds.num_in_flight > 0
            is_for_drafts = any(entry.num_draft_tokens > 0 for entry in message.entries)
            sent += is_for_drafts
            asked += is_for_drafts and not is_beside
            cluster.clock.advance(ASK_S)  # what writing it down takes
        plain_send(channel, peer_id, message)

    plain_send = MemoryChannel.send
    monkeypatch.setattr(MemoryChannel, "send", send)
    cluster.run([a_request(f"r{index}", random.Random(index)) for index in range(3)])
    metrics = cluster.engine.metrics()
    waited_s = cluster.proposer.counters["draft_wait_seconds"]
    assert sent > 5
    assert asked > 0
    assert metrics.coordinator_s == pytest.approx(asked * ASK_S)
    assert metrics.draft_s == pytest.approx(waited_s)
    assert metrics.draft_latencies.series("x")["x_sum"] == pytest.approx(waited_s)
    if mode == "lockstep":
        assert waited_s > 5 * BUSY_S
        assert metrics.round_s == pytest.approx(metrics.draft_s + metrics.verify_s + metrics.coordinator_s)


def test_what_is_done_while_others_draft_is_waiting_for_them() -> None:
    cluster = Cluster(Faults(delay_s=(WIRE_S, WIRE_S)), num_drafters=0)
    cluster.start_drafter(BUSY_S)
    proposer = cluster.proposer
    proposer._meanwhile = lambda: cluster.clock.advance(0.5)
    one = sequence("a")
    assert proposer.propose([one], budgets(one))
    assert proposer.take_asking_s() == pytest.approx(0.0)
    assert proposer.propose([], {}) == {}
    assert proposer.take_asking_s() == 0.0, "nobody drafts: the target comes first"
    assert proposer.counters["draft_wait_seconds"] == pytest.approx(max(0.5, BUSY_S + 2 * WIRE_S), abs=0.03)


class _TargetElsewhere(_SlowTarget):
    """Takes `verify_s` beside what is done meanwhile."""

    def __init__(self, clock: ManualClock, verify_s: float) -> None:
        super().__init__(clock)
        self._verify_s = verify_s

    @property
    def is_elsewhere(self) -> bool:
        return True

    def collect(self) -> TargetResult:
        self._clock.advance(self._verify_s)
        return ToyTarget.collect(self)


@pytest.mark.parametrize("verify_s", [0.0, VERIFY_S], ids=["quick", "slow"])
def test_what_is_done_beside_the_target_is_hidden_while_that_is_waited_for(verify_s: float) -> None:
    clock = ManualClock()
    calls: list[float] = []

    def meanwhile() -> None:
        calls.append(clock.now_s())
        clock.advance(BETWEEN_S)

    engine = Engine.from_parts(
        target=_TargetElsewhere(clock, verify_s),
        proposer=OracleProposer(),
        tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE),
        clock=clock,
        meanwhile=meanwhile,
    )
    engine.add_request(request("a", (1, 2, 3), GREEDY, seed=1))
    while engine.has_work:
        engine.step()
    metrics = engine.metrics()
    assert len(calls) == metrics.num_rounds > 2
    shown_s = 0.0 if verify_s else metrics.num_rounds * BETWEEN_S
    assert metrics.coordinator_s == pytest.approx(shown_s)
    assert metrics.round_s == pytest.approx(metrics.num_rounds * (verify_s + BETWEEN_S))


@pytest.mark.parametrize("mode", ["lockstep", "ping_pong", "draft_ahead"])
def test_every_round_has_time_for_what_others_wait_for(mode: OverlapMode) -> None:
    cluster = Cluster(Faults(delay_s=(WIRE_S, WIRE_S)), num_drafters=1, mode=mode)
    calls: list[int] = []
    cluster.engine._meanwhile = lambda: calls.append(cluster.engine._rounds.num_in_flight)
    for index in range(3):
        cluster.engine.add_request(a_request(f"r{index}", random.Random(index)))
    while cluster.engine.has_work:
        calls.clear()
        cluster.engine.step()
        assert calls
        assert min(calls) > 0, "the target is at work"


@pytest.mark.parametrize("how", ["asked", "lost", "aborted", "done"])
def test_rounds_are_counted_once_the_target_is_at_work_on_the_next(how: str) -> None:
    cluster = Cluster(Faults(delay_s=(WIRE_S, WIRE_S)), num_drafters=1)
    cluster.engine.add_request(a_request("a", random.Random(1)))
    metrics = cluster.engine.metrics()
    cluster.engine.step()
    cluster.engine.step()
    assert metrics.num_rounds == 1, "the second waits until the target has something to do"
    if how == "asked":
        assert cluster.engine.metrics().num_rounds == 2, "who asks between two steps knows all"
    elif how == "lost":
        cluster.engine._rounds.abandon()
        assert metrics.num_rounds == 2
    elif how == "aborted":
        cluster.engine.abort(RequestId("a"))
        assert metrics.num_rounds == 2, "nobody knows when the next round is"
    else:
        num_steps = 2
        while cluster.engine.has_work:
            cluster.engine.step()
            num_steps += 1
        assert metrics.num_rounds == num_steps
        assert metrics.num_drafts == sum(its.num_drafts for its in metrics.by_method().values()) > 0
