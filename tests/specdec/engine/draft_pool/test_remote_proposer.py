"""What travels to a draft worker, what is believed of what comes back, and what a silent one costs."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.draft_pool.message_lengths import longest_message_bytes
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.draft_pool.server import DraftServer
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.transport.base import PeerId
from specdec.transport.memory import Faults
from tests.specdec.engine.draft_pool.scripted_worker import scripted
from tests.specdec.engine.draft_pool.wanted_drafts import FreeSequence, budgets, sequence
from tests.specdec.engine.remote_cluster import (
    CAPABILITIES,
    OTHER_MODEL,
    VOCAB,
    Cluster,
    ToyDrafter,
    a_request,
    reasons,
    serve_all,
)


def test_only_new_tokens_travel() -> None:
    _, worker, proposer = scripted({})
    one = sequence("a")
    for committed in ((), (1, 2), (3,)):
        if committed:
            one.commit(committed)
        proposal = proposer.propose([one], budgets(one))[one.request_id]
        assert (proposal.committed_len, proposal.prefix_hash) == (one.committed_len, one.prefix_hash)
        assert proposal.token_ids == (1, 2, 3)
    entries = [request.entries[0] for request in worker.asked]
    assert [(entry.base_len, entry.token_ids) for entry in entries] == [
        (0, tuple(one.token_ids[:6])),
        (6, (1, 2)),
        (8, (3,)),
    ]
    assert [entry.opening is not None for entry in entries] == [True, False, False]


def test_prompts_are_sent_ahead_and_not_waited_for() -> None:
    cluster, worker, proposer = scripted()
    one = sequence("a")
    assert proposer.propose([one], {}) == {}
    assert cluster.clock.now_s() == 0.0
    cluster.network.run_for(0.1)
    assert worker.asked[0].entries[0].num_draft_tokens == 0
    assert proposer.propose([one], {}) == {}
    cluster.network.run_for(0.1)
    assert len(worker.asked) == 1, "there was nothing new to say"
    worker.replies = [{}]
    assert proposer.propose([one], budgets(one))
    assert worker.asked[1].entries[0].token_ids == ()


@pytest.mark.parametrize(
    ("changes", "counter"),
    [
        ({"prefix_hash": 1}, "stale_drafts_dropped"),
        ({"committed_len": 5}, "stale_drafts_dropped"),
        ({"epoch": 99}, "stale_drafts_dropped"),
        ({"request_id": RequestId("somebody else")}, "stale_drafts_dropped"),
        ({"token_ids": (1, 2, 3, 4)}, "invalid_drafts_dropped"),
        ({"token_ids": (1, VOCAB)}, "invalid_drafts_dropped"),
        ({"token_ids": (-1,)}, "invalid_drafts_dropped"),
    ],
)
def test_what_does_not_fit_is_dropped_and_counted(changes: Mapping[str, object], counter: str) -> None:
    _, _, proposer = scripted(changes)
    one = sequence("a")
    assert proposer.propose([one], budgets(one)) == {}
    assert proposer.counters[counter] == 1
    assert proposer.counters["fallback_requests"] == 1
    assert reasons(proposer) == {"invalid" if counter.startswith("invalid") else "late": 1}


def test_an_answer_that_comes_twice_counts_once() -> None:
    _, _, proposer = scripted({}, {"token_ids": (4, 4)})
    one = sequence("a")
    assert proposer.propose([one], budgets(one))[one.request_id].token_ids == (1, 2, 3)
    one.commit((1,))
    assert proposer.propose([one], budgets(one))[one.request_id].token_ids == (1, 2, 3)
    assert proposer.counters["stale_drafts_dropped"] == 1


@pytest.mark.parametrize(("num_unread", "reason"), [(0, "nothing"), (9, "behind")])
def test_an_answer_without_tokens_is_no_proposal(num_unread: int, reason: str) -> None:
    """Who falls back on a lookup asks for those that have none."""
    _, _, proposer = scripted({"token_ids": (), "num_unread": num_unread})
    one = sequence("a")
    assert proposer.propose([one], budgets(one)) == {}
    assert reasons(proposer) == {reason: 1}
    assert proposer.counters["fallback_requests"] == 1


def test_a_worker_that_forgot_is_told_everything() -> None:
    _, worker, proposer = scripted({})
    one = sequence("a")
    proposer.propose([one], budgets(one))
    one.commit((1, 2))
    worker.replies = [{"needs_start": True, "token_ids": ()}]
    assert proposer.propose([one], budgets(one)) == {}
    assert reasons(proposer) == {"forgotten": 1}
    worker.replies = [{}]
    assert proposer.propose([one], budgets(one))
    assert worker.asked[-1].entries[0].token_ids == tuple(one.token_ids)
    assert worker.asked[-1].entries[0].opening is not None


def test_a_dead_drafter_costs_one_deadline_and_comes_back() -> None:
    cluster, worker, proposer = scripted({})
    one = sequence("a")
    proposer.propose([one], budgets(one))
    worker.replies = []
    times = []
    for _ in range(200):
        started_s = cluster.clock.now_s()
        assert proposer.propose([one], budgets(one)) == {}
        times.append(cluster.clock.now_s() - started_s)
        cluster.network.run_for(0.01)  # the target's part of the round
    assert times[0] == pytest.approx(0.05)
    assert sum(times[1:]) == 0.0
    assert len(worker.asked) < 10, "it is not bombarded either"
    assert reasons(proposer) == {"late": 200}
    worker.replies = [{}]
    found = []
    for _ in range(300):
        found.append(bool(proposer.propose([one], budgets(one))))
        cluster.network.run_for(0.01)
    assert found.index(True) < 210, "two seconds at most until the next attempt"
    assert all(found[found.index(True) :])


def test_the_loss_of_a_link_ends_the_wait_at_once() -> None:
    cluster, worker, proposer = scripted()
    one = sequence("a")
    cluster.network.schedule(0.01, lambda: cluster.network.kill(worker.channel.address.peer_id))
    assert proposer.propose([one], budgets(one)) == {}
    assert cluster.clock.now_s() == pytest.approx(0.01)


def test_requests_of_a_silent_drafter_move_to_another() -> None:
    cluster = Cluster(Faults(), num_drafters=2)
    sequences = [sequence(f"s{index}") for index in range(6)]
    assert len(cluster.proposer.propose(sequences, budgets(*sequences))) == 6
    shares = [len(drafter.known) for drafter in cluster.drafters.values()]
    assert shares == [3, 3], "sequences are shared out"
    first, second = cluster.drafters
    survivor = cluster.drafters[second]
    cluster.stop_drafter(first, told=False)
    assert len(cluster.proposer.propose(sequences, budgets(*sequences))) == 3
    cluster.network.run_for(0.6)
    assert len(cluster.proposer.propose(sequences, budgets(*sequences))) == 6
    assert len(survivor.known) == 6


def test_a_new_drafter_is_told_the_whole_prefix() -> None:
    cluster = Cluster(Faults(), num_drafters=1)
    one = sequence("a")
    cluster.proposer.propose([one], budgets(one))
    (old,) = cluster.drafters
    cluster.stop_drafter(old, told=True)
    one.commit((1, 2, 3))
    assert cluster.proposer.propose([one], budgets(one)) == {}
    assert reasons(cluster.proposer) == {"none": 1}
    cluster.start_drafter()
    proposal = cluster.proposer.propose([one], budgets(one))[one.request_id]
    assert list(proposal.token_ids) == OTHER_MODEL.continuation(one.token_ids, one.params, one.seed, 3)


def test_release_reaches_the_worker() -> None:
    cluster = Cluster(Faults(), num_drafters=1)
    one, other = sequence("a"), sequence("b")
    cluster.proposer.propose([one, other], budgets(one, other))
    (drafter,) = cluster.drafters.values()
    assert len(drafter.known) == 2
    cluster.proposer.release([one.request_id, RequestId("unknown")])
    cluster.network.run_for(0.1)
    assert len(drafter.known) == 1


def test_who_found_no_place_is_not_too_long_though_one_is_free_a_moment_later() -> None:
    """The answer tells of the places that there are when it is sent: a release came in the same turn."""
    cluster = Cluster(Faults(), num_drafters=1, shares=DraftShareConfig(max_sequences=1))
    (name,), (server,) = cluster.servers.keys(), cluster.servers.values()
    present, late = sequence("present"), sequence("late")
    cluster.proposer.propose([present], budgets(present))
    cluster.network.run_for(0.2)
    cluster.network.serve(name, lambda: None)
    cluster.proposer.propose([late], {})
    cluster.proposer.release([present.request_id])
    cluster.network.run_for(0.1)
    server.step(0)
    cluster.network.run_for(0.1)
    assert (server.counters["refused_entries"], server.num_sequences) == (1, 0)
    cluster.proposer.propose([], {})
    assert cluster.proposer.counters["draft_sequences_refused"] == 1
    assert cluster.proposer.counters.get("draft_sequences_outgrown", 0) == 0


def test_coordinators_do_not_see_each_other() -> None:
    """Two coordinators use the same request id for different texts at one draft worker."""
    cluster = Cluster(Faults(), num_drafters=1)
    (name,) = cluster.drafters
    server_channel = cluster.network._channels[name]
    other_channel = cluster.network.open(PeerId("other-coordinator"))
    server_channel.admit([cluster.proposer._channel.address, other_channel.address])
    other = RemoteProposer(other_channel, capabilities=CAPABILITIES, vocab_size=VOCAB, clock=cluster.clock)
    other.set_workers([cluster.addresses[name]])
    mine, theirs = sequence("same", prompt=6), sequence("same", prompt=9)
    for _ in range(3):
        for proposer, one in ((cluster.proposer, mine), (other, theirs)):
            proposal = proposer.propose([one], budgets(one))[one.request_id]
            expected = OTHER_MODEL.continuation(one.token_ids, one.params, one.seed, 3)
            assert list(proposal.token_ids) == expected
            one.commit(expected[:2])
    other.release([theirs.request_id])
    cluster.network.run_for(0.1)
    assert cluster.proposer.propose([mine], budgets(mine))


def test_requests_that_are_there_together_are_drafted_together() -> None:
    cluster = Cluster(Faults(), num_drafters=0)
    channel = cluster.network.open(PeerId("draft"))
    drafter = ToyDrafter(cluster.clock)
    server = DraftServer(channel, drafter, clock=cluster.clock)
    clients = []
    for index in range(3):
        client = cluster.network.open(PeerId(f"c{index}"))
        client.connect(channel.address)
        clients.append(client)
    channel.admit([client.address for client in clients])
    for client in clients:
        one = RemoteProposer(client, capabilities=CAPABILITIES, vocab_size=VOCAB, clock=cluster.clock)
        one.set_workers([channel.address])
        one.propose([sequence("a")], {})
    cluster.network.run_for(0.1)
    assert server.step(0)
    assert drafter.num_calls == 1
    assert server.num_sequences == 3
    server.retain([PeerId("c1")])
    server.step(0)
    assert server.num_sequences == 1
    assert len(drafter.known) == 1


def test_a_long_prompt_does_not_hold_up_those_that_are_quick() -> None:
    cluster = Cluster(Faults(), num_drafters=1)
    (drafter,) = cluster.drafters.values()
    quick, long = sequence("quick"), sequence("long", prompt=100)
    cluster.proposer.propose([quick], budgets(quick))
    before = drafter.num_calls
    cluster.proposer.propose([quick, long], budgets(quick, long))
    assert drafter.num_calls == before + 2


def test_sequences_that_nobody_asks_about_are_forgotten() -> None:
    cluster = Cluster(Faults(), num_drafters=1)
    (drafter,) = cluster.drafters.values()
    one, other = sequence("a"), sequence("b")
    cluster.proposer.propose([one, other], budgets(one, other))
    for _ in range(13):
        cluster.network.run_for(60.0)
        assert cluster.proposer.propose([one], budgets(one))
    assert len(drafter.known) == 1


def test_too_long_a_prefix_is_not_sent() -> None:
    cluster, worker, _ = scripted({})
    channel = cluster.network.open(PeerId("limited"))
    worker.channel.admit([channel.address])
    from dataclasses import replace

    proposer = RemoteProposer(
        channel, capabilities=replace(CAPABILITIES, max_context=8), vocab_size=VOCAB, clock=cluster.clock
    )
    proposer.set_workers([worker.channel.address])
    short, long = sequence("short", prompt=5), sequence("long", prompt=8)
    assert set(proposer.propose([short, long], budgets(short, long))) == {short.request_id}
    assert reasons(proposer) == {"too_long": 1}


def test_many_long_prompts_are_told_in_messages_that_the_worker_takes() -> None:
    """A coordinator that gets a fresh draft worker tells it everything at once."""
    most = longest_message_bytes(max_model_len=20_000, vocab_size=VOCAB, grammar_bytes=1000)
    cluster = Cluster(Faults(), num_drafters=0)
    name = PeerId("draft")
    channel = cluster.network.open(name, max_message_bytes=most)
    server = DraftServer(channel, ToyDrafter(cluster.clock), clock=cluster.clock)
    own = cluster.network.open(PeerId("coordinator"))
    channel.admit([own.address])
    proposer = RemoteProposer(
        own, capabilities=CAPABILITIES, vocab_size=VOCAB, max_message_bytes=most, clock=cluster.clock
    )
    proposer.set_workers([channel.address])
    sequences = [sequence(f"s{index}", prompt=20_000) for index in range(40)]
    proposer.propose(sequences, budgets(*sequences))
    assert own.counters.sent > 1
    assert most < 40 * 20_000, "more than one message may hold"
    cluster.network.run_for(0.1)
    for _ in range(40):
        server.step(0)
    assert channel.counters.dropped == {}
    assert server.num_sequences == 40
    for one in sequences:
        one.commit([1])
    cluster.network.serve(name, lambda: serve_all(server))
    num_sent = own.counters.sent
    found = proposer.propose(sequences, budgets(*sequences))
    assert own.counters.sent == num_sent + 1, "once they are known, a round is one message"
    assert len(found) == 40


def test_who_has_more_to_be_told_than_a_message_holds_goes_without_drafts() -> None:
    cluster, worker, _ = scripted({})
    channel = cluster.network.open(PeerId("limited"))
    worker.channel.admit([channel.address])
    proposer = RemoteProposer(
        channel, capabilities=CAPABILITIES, vocab_size=VOCAB, max_message_bytes=2000, clock=cluster.clock
    )
    proposer.set_workers([worker.channel.address])
    short, long = sequence("short"), sequence("long", prompt=700)
    for _ in range(3):
        assert set(proposer.propose([short, long], budgets(short, long))) == {short.request_id}
        short.commit([1, 2])
    assert {entry.request_id for message in worker.asked for entry in message.entries} == {"short"}
    assert proposer.counters["draft_sequences_too_long"] == 1
    proposer.release([long.request_id])
    again = sequence("long")
    assert set(proposer.propose([again], budgets(again))) == {again.request_id}


def test_where_a_text_ends_is_not_told() -> None:
    """Stop strings may be as long as a body, and are of no use to who drafts."""
    _, worker, proposer = scripted({})
    request = Request(
        request_id=RequestId("a"),
        prompt_token_ids=(1, 2, 3),
        params=SamplingParams(temperature=0.5, stop=("x" * 100_000,)),
        seed=1,
    )
    one = FreeSequence(request)
    assert proposer.propose([one], budgets(one))
    ((entry,),) = [message.entries for message in worker.asked]
    assert entry.opening is not None
    assert entry.opening.params == SamplingParams(temperature=0.5)


def test_two_releases_and_a_late_question_leave_nothing_behind() -> None:
    """A question that arrives after its release must not revive the sequence for ever."""
    cluster = Cluster(Faults(delay_s=(0.0, 0.5)), num_drafters=1)
    cluster.network.faults = Faults(delay_s=(0.0, 0.5), in_order=False)
    rng = random.Random(1)
    for index in range(20):
        request = a_request(f"r{index}", rng)
        one = FreeSequence(request)
        cluster.proposer.propose([one], budgets(one))
        cluster.proposer.release([one.request_id])
    cluster.network.faults = Faults()
    (drafter,) = cluster.drafters.values()
    last = sequence("last")
    for _ in range(13):
        cluster.network.run_for(60.0)
        cluster.proposer.propose([last], budgets(last))
    assert len(drafter.known) == 1
