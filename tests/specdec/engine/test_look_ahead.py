"""Drafting ahead, from the coordinator's side: hits, misses, and what never comes true."""

from __future__ import annotations

import random

import pytest

from specdec.core.prefix_hash import extend_prefix_hash
from specdec.transport.memory import Faults
from specdec.transport.messages import DraftBranch, ProposeAnswer, ProposeReply, ProposeRequest
from tests.specdec.engine.draft_pool.scripted_worker import Scripted
from tests.specdec.engine.draft_pool.wanted_drafts import budgets, sequence, wish
from tests.specdec.engine.remote_cluster import VOCAB, Cluster, a_request, expected, reasons

ALL_LENGTHS = (1, 1, 1, 4)


class _Prophet(Scripted):
    """Answers every wish with the branches that the test puts there: assumed tokens to continuation."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, "prophet")
        self.branches: dict[tuple[int, ...], tuple[int, ...]] = {}

    def serve(self) -> None:
        envelope = self.channel.receive(0)
        if not isinstance(envelope.message, ProposeRequest):
            return
        self.asked.append(envelope.message)
        answers = tuple(
            ProposeAnswer(
                request_id=entry.request_id,
                epoch=entry.epoch,
                committed_len=entry.committed_len,
                prefix_hash=entry.prefix_hash,
                token_ids=() if entry.fan_out is not None else (9,) * entry.num_draft_tokens,
                noise_stream="target",
                branches=tuple(
                    DraftBranch(
                        entry.committed_len + len(assumed),
                        extend_prefix_hash(entry.prefix_hash, assumed),
                        tokens,
                    )
                    for assumed, tokens in self.branches.items()
                    if entry.fan_out is not None
                ),
            )
            for entry in envelope.message.entries
        )
        self.channel.send(envelope.sender, ProposeReply(envelope.message.round_id, answers, 0.001))


def prophet() -> tuple[Cluster, _Prophet]:
    cluster = Cluster(Faults(), num_drafters=0)
    return cluster, _Prophet(cluster)


def counts(cluster: Cluster, *names: str) -> list[float]:
    return [cluster.proposer.counters.get(name, 0) for name in names]


HITS_AND_MISSES = ("speculation_cache_hits", "speculation_cache_misses")


def test_the_verdict_that_was_prepared_for_needs_no_question() -> None:
    cluster, worker = prophet()
    one = sequence("a")
    worker.branches = {(1, 7): (5, 5), (1, 2, 3, 8): (6, 6, 6)}
    cluster.proposer.look_ahead([wish(one)])
    one.commit((1, 2, 3, 8))
    proposal = cluster.proposer.propose([one], budgets(one))[one.request_id]
    assert proposal.token_ids == (6, 6, 6)
    assert (proposal.committed_len, proposal.prefix_hash) == (one.committed_len, one.prefix_hash)
    assert len(worker.asked) == 1
    assert counts(cluster, *HITS_AND_MISSES) == [1, 0]


def test_what_was_prepared_some_rounds_ago_is_no_verdict() -> None:
    """Speculation was off meanwhile: nobody asked."""
    cluster, worker = prophet()
    one = sequence("a")
    cluster.proposer.look_ahead([wish(one)])
    one.commit((4,) * 9)
    proposal = cluster.proposer.propose([one], budgets(one))[one.request_id]
    assert proposal.token_ids == (9, 9, 9), "it is asked about in the ordinary way"
    assert cluster.proposer.take_ahead_outcomes() == []
    assert counts(cluster, *HITS_AND_MISSES) == [0, 0]
    assert len(worker.asked) == 2


def test_what_was_prepared_is_cut_to_the_budget() -> None:
    cluster, worker = prophet()
    one = sequence("a")
    worker.branches = {(1, 2, 3, 8): (6, 7, 8)}
    cluster.proposer.look_ahead([wish(one)])
    one.commit((1, 2, 3, 8))
    assert cluster.proposer.propose([one], budgets(one, k=2))[one.request_id].token_ids == (6, 7)


def test_on_a_miss_the_request_goes_on_without_drafts_and_nobody_is_asked() -> None:
    cluster, worker = prophet()
    hit, missed = sequence("hit"), sequence("missed", 4)
    worker.branches = {(1, 7): (5, 5)}
    cluster.proposer.look_ahead([wish(hit), wish(missed)])
    hit.commit((1, 7))
    missed.commit((1, 8))
    proposals = cluster.proposer.propose([hit, missed], budgets(hit, missed))
    assert proposals.keys() == {hit.request_id}
    assert len(worker.asked) == 1
    assert counts(cluster, *HITS_AND_MISSES, "fallback_requests") == [1, 1, 1]
    assert reasons(cluster.proposer) == {"miss": 1}


def test_after_a_miss_it_is_looked_ahead_of_nothing_pending() -> None:
    cluster, worker = prophet()
    one = sequence("a")
    cluster.proposer.look_ahead([wish(one)])
    one.commit((4,))
    assert not cluster.proposer.propose([one], budgets(one))
    worker.branches = {(9,): (2, 2)}
    cluster.proposer.look_ahead([wish(one, pending=())])
    one.commit((9,))
    assert cluster.proposer.propose([one], budgets(one))[one.request_id].token_ids == (2, 2)
    entry = worker.asked[-1].entries[0]
    assert (entry.pending, entry.fan_out, entry.token_ids) == ((), (4,), (4,))


def test_a_round_that_did_not_happen_is_asked_about_in_the_ordinary_way() -> None:
    cluster, worker = prophet()
    one = sequence("a")
    worker.branches = {(1, 7): (5, 5)}
    cluster.proposer.look_ahead([wish(one)])
    proposals = cluster.proposer.propose([one], budgets(one))  # preempted, say: nothing was committed
    assert proposals[one.request_id].token_ids == (9, 9, 9)
    assert worker.asked[-1].entries[0].fan_out is None
    assert counts(cluster, *HITS_AND_MISSES) == [0, 0]


def test_without_a_look_ahead_rounds_are_as_ever() -> None:
    cluster, worker = prophet()
    one = sequence("a")
    cluster.proposer.look_ahead([])
    assert cluster.proposer.propose([one], budgets(one))[one.request_id].token_ids == (9, 9, 9)
    assert len(worker.asked) == 1


@pytest.mark.parametrize(
    "tokens", [(5, 5, 5, 5), (VOCAB,), (-1,)], ids=["longer than asked", "unknown token", "negative"]
)
def test_branches_that_cannot_be_right_are_dropped_and_counted(tokens: tuple[int, ...]) -> None:
    cluster, worker = prophet()
    one = sequence("a")
    worker.branches = {(1, 7): tokens}
    cluster.proposer.look_ahead([wish(one)])
    one.commit((1, 7))
    assert not cluster.proposer.propose([one], budgets(one))
    assert counts(cluster, "invalid_drafts_dropped") == [1]


def test_no_more_branches_are_kept_than_were_asked_for() -> None:
    cluster, worker = prophet()
    one = sequence("a")
    worker.branches = {(1, token): (5,) for token in range(VOCAB)}
    cluster.proposer.look_ahead([wish(one)])
    one.commit((1, VOCAB - 1))
    assert not cluster.proposer.propose([one], budgets(one))


def test_a_released_sequence_is_not_waited_for() -> None:
    cluster = Cluster(Faults(delay_s=(0.02, 0.02)), num_drafters=1)
    gone, other = sequence("gone"), sequence("other", 5)
    cluster.proposer.look_ahead([wish(gone)])
    cluster.proposer.release([gone.request_id])
    before_s = cluster.clock.now_s()
    assert cluster.proposer.propose([other], budgets(other))
    assert cluster.clock.now_s() - before_s < 0.1
    assert counts(cluster, "draft_deadline_misses") == [0]


def test_a_worker_that_left_is_not_waited_for() -> None:
    cluster = Cluster(Faults(), num_drafters=1)
    one = sequence("a")
    cluster.proposer.look_ahead([wish(one)])
    cluster.proposer.set_workers([])
    one.commit((1, 2))
    before_s = cluster.clock.now_s()
    assert not cluster.proposer.propose([one], budgets(one))
    assert cluster.clock.now_s() == before_s


def test_a_dead_worker_costs_one_deadline() -> None:
    cluster = Cluster(Faults(), num_drafters=1)
    one = sequence("a")
    name = next(iter(cluster.drafters))
    cluster.network.kill(name)
    for length in range(1, 6):
        cluster.proposer.look_ahead([wish(one)])
        one.commit(tuple(range(length)))
        cluster.proposer.propose([one], budgets(one))
    assert cluster.clock.now_s() < 3.0
    assert counts(cluster, "draft_deadline_misses")[0] <= 2


def test_whole_engines_hit_most_of_the_time_and_write_the_same() -> None:
    cluster = Cluster(Faults(), mode="draft_ahead")
    rng = random.Random(3)
    requests = [a_request(f"r{index}", rng) for index in range(12)]
    tokens = cluster.run(requests)
    assert tokens == {one.request_id: expected(one) for one in requests}
    hits, misses = counts(cluster, *HITS_AND_MISSES)
    assert hits > misses > 0
    assert cluster.engine.metrics().num_accepted_tokens > 20
    assert not cluster.proposer._prepared
    assert not cluster.proposer._registry.registrations
