"""A draft worker that says anything: nobody raises, waits for ever, or writes another token for its sake."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from specdec.core.distributions import TokenDistribution
from specdec.core.errors import ChannelTimeout
from specdec.core.ids import RequestId
from specdec.core.sampling_params import SamplingParams
from specdec.engine.draft_pool.server import DraftServer
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.transport.base import Envelope, PeerId
from specdec.transport.memory import Faults
from specdec.transport.messages import (
    DraftBranch,
    Fatal,
    Fenced,
    Hello,
    LaneMoved,
    Ping,
    ProposeAnswer,
    ProposeEntry,
    ProposeReply,
    ProposeRequest,
    Release,
    encode,
)
from specdec.transport.wrapped import WrappedChannel
from tests.pairwise import mostly_full
from tests.specdec.engine.judged_engines import drafter_for, judge_of
from tests.specdec.engine.remote_cluster import OTHER_MODEL, Cluster, a_request, expected

NUMBERS = (0, 1, -1, 3, 7, 1 << 31, -(1 << 63), (1 << 63) - 1)
SECONDS = (0.0, 1e-3, -1.0, 1e300, float("nan"), float("inf"), float("-inf"))
MODES: tuple[OverlapMode, ...] = ("lockstep", "ping_pong", "draft_ahead")


class Hostile:
    """Answers what it is asked with something like an answer, and with anything else."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self.rng = rng
        self.channel = cluster.network.open(PeerId("hostile"))
        self.channel.admit([cluster.proposer._channel.address])
        cluster.network.serve(PeerId("hostile"), self.serve)
        cluster.addresses[PeerId("hostile")] = self.channel.address
        cluster.proposer.set_workers(list(cluster.addresses.values()))
        self.num_asked = 0

    def serve(self) -> None:
        with suppress(ChannelTimeout):
            while True:
                envelope = self.channel.receive(0)
                if isinstance(envelope.message, ProposeRequest):
                    self.num_asked += 1
                    self.reply(envelope.sender, envelope.message)

    def reply(self, to: PeerId, request: ProposeRequest) -> None:
        rng = self.rng
        for _ in range(rng.randint(1, 3)):
            fate = rng.random()
            if fate < 0.1:
                self.channel.inject(to, rng.randbytes(rng.randint(0, 40)))
            elif fate < 0.2:
                frame = bytearray(encode(ProposeReply(request.round_id, ())))
                frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
                self.channel.inject(to, bytes(frame))
            elif fate < 0.3:
                kinds = (Ping(1), Hello(1), Fatal("no"), Fenced(1, 2), Release(()), LaneMoved("x"))
                self.channel.send(to, rng.choice(kinds))
            else:
                self.channel.send(to, self.some_reply(request))

    def some_reply(self, request: ProposeRequest) -> ProposeReply:
        rng = self.rng
        return ProposeReply(
            round_id=rng.choice((request.round_id, *NUMBERS)),
            answers=tuple([self.some_answer(entry) for entry in request.entries for _ in range(2)]),
            draft_s=rng.choice(SECONDS),
            counts=rng.choice((None, {"draft_prefix_cache_hits": rng.choice(NUMBERS)})),
            num_sequences=rng.choice(NUMBERS),
            max_sequences=rng.choice(NUMBERS),
            num_places=rng.choice(NUMBERS),
            sent_s=rng.choice((None, *SECONDS)),
            max_length=rng.choice((0, 0, 0, *NUMBERS)),
        )

    def some_answer(self, entry: ProposeEntry) -> ProposeAnswer:
        rng = self.rng
        tokens = tuple(rng.choices((0, 5, 10, *NUMBERS), k=rng.randint(0, 6)))
        branch = DraftBranch(entry.committed_len + 1, rng.choice((entry.prefix_hash, 0)), tokens)
        answer = ProposeAnswer(
            request_id=entry.request_id,
            epoch=entry.epoch,
            committed_len=entry.committed_len,
            prefix_hash=entry.prefix_hash,
            token_ids=tokens,
        )
        lies: dict[str, object] = {
            "request_id": RequestId("nobody's"),
            "epoch": rng.choice(NUMBERS),
            "committed_len": rng.choice(NUMBERS),
            "prefix_hash": 5,
            "parents": tuple(rng.choices(NUMBERS, k=rng.randint(0, 6))),
            "noise_stream": rng.choice(("draft", "accept")),
            "q_rows": (),
            "needs_start": True,
            "is_full": True,
            "lacks_memory": True,
            "branches": (branch,) * 70,
        }
        told = {name: lies[name] for name in rng.sample(list(lies), rng.choice((0, 0, 1, 2)))}
        return msgspec.structs.replace(answer, **told)


@pytest.mark.parametrize("mode", mostly_full(MODES, ["draft_ahead"]))
def test_whatever_a_draft_worker_says_tokens_are_the_targets(mode: OverlapMode) -> None:
    num_malformed = num_stale = num_invalid = num_accepted = 0
    for seed in range(60):
        rng = random.Random(seed)
        cluster = Cluster(Faults(delay_s=(0.0, 0.002)), seed, num_drafters=seed % 2, mode=mode)
        hostile = Hostile(cluster, rng)
        requests = [a_request(f"r{index}", rng) for index in range(5)]
        tokens = cluster.run(requests)
        for request in requests:
            assert tokens[request.request_id] == expected(request), (seed, request)
        assert hostile.num_asked > 0
        assert cluster.clock.now_s() < 60, "it is waited for, but not for ever"
        assert not cluster.proposer._registry.registrations
        channel, counters = cluster.proposer._channel.counters, cluster.proposer.counters
        num_malformed += channel.dropped["malformed"] + channel.dropped["version"]
        num_stale += counters.get("stale_drafts_dropped", 0)
        num_invalid += counters.get("invalid_drafts_dropped", 0)
        if seed % 2:
            num_accepted += cluster.engine.metrics().num_accepted_tokens
        for value in counters.values():
            assert value == value, "not a number"
    assert min(num_malformed, num_stale, num_invalid) > 20, "what is dropped is counted"
    assert num_accepted > 50, "and the other draft worker is of use all the same"


Q_ROWS = {
    "right": ((3, 5), (0.5, 0.5)),
    "twice, last without": ((3, 3), (0.5, 0.0)),
    "twice": ((3, 5, 3), (0.5, 0.5, 0.5)),
    "not in order": ((5, 3), (0.5, 0.5)),
    "below 0": ((3, 5), (0.5, -0.5)),
    "not a number": ((3, 5), (0.5, float("nan"))),
    "drawn from nan": ((3,), (float("nan"),)),
    "infinite": ((3, 5), (0.5, float("inf"))),
    "drawn from infinity": ((3,), (float("inf"),)),
    "0": ((3, 5), (0.0, 1.0)),
    "of another": ((4, 5), (0.5, 0.5)),
    "of nothing": ((), ()),
    "beyond": ((3, 1 << 31), (0.5, 0.5)),
}


class Boasting(Hostile):
    """Drafts token 3, and says that it was drawn from a certain row."""

    row = TokenDistribution(b"", b"")

    def reply(self, to: PeerId, request: ProposeRequest) -> None:
        answers = [
            ProposeAnswer(
                request_id=entry.request_id,
                epoch=entry.epoch,
                committed_len=entry.committed_len,
                prefix_hash=entry.prefix_hash,
                token_ids=(3,),
                noise_stream="draft",
                q_rows=(self.row,),
            )
            for entry in request.entries
            if entry.num_draft_tokens
        ]
        self.channel.send(to, ProposeReply(request.round_id, tuple(answers)))


@pytest.mark.parametrize("rule", ["rejection", "block", "multi_round"])
@pytest.mark.parametrize("kind", Q_ROWS)
def test_malformed_distributions_are_dropped_before_the_target_sees_them(kind: str, rule: str) -> None:
    drafter = drafter_for(rule, OTHER_MODEL)
    cluster = Cluster(
        Faults(),
        num_drafters=0,
        capabilities=replace(drafter.capabilities, remote=True),
        judge=judge_of(rule),
    )
    hostile = Boasting(cluster, random.Random(1))
    ids, probabilities = Q_ROWS[kind]
    hostile.row = TokenDistribution(
        np.array(ids, np.uint32).tobytes(), np.array(probabilities, np.float32).tobytes()
    )
    request = msgspec.structs.replace(
        a_request("r", random.Random(1)), params=SamplingParams(temperature=0.9, max_tokens=12)
    )
    assert len(cluster.run([request])[request.request_id]) == 12
    metrics = cluster.engine.metrics()
    assert (metrics.num_drafts > 0) == (kind == "right")
    assert (metrics.proposals_dropped["unverifiable"] > 0) == (kind != "right")


def test_a_draft_worker_that_talks_on_and_on_keeps_nobody_from_the_next_round() -> None:
    cluster = Cluster(Faults())

    class Endless(WrappedChannel):
        num_heard = 0

        def receive(self, timeout_s: float | None) -> Envelope:
            if timeout_s == 0:
                self.num_heard += 1
                assert self.num_heard < 500_000
                return Envelope(sender=PeerId("draft-1"), message=ProposeReply(1 << 40, ()))
            return self.inner.receive(timeout_s)

    endless = Endless(cluster.proposer._channel)
    cluster.proposer._channel = endless
    request = a_request("r", random.Random(1))
    assert cluster.run([request]) == {request.request_id: expected(request)}
    assert endless.num_heard > 0


def test_messages_of_other_kinds_are_counted_at_a_draft_worker() -> None:
    cluster = Cluster(Faults(), num_drafters=1)
    (server,) = cluster.servers.values()
    assert isinstance(server, DraftServer)
    (name,) = cluster.servers
    channel = cluster.proposer._channel
    cluster.proposer.propose([], {})  # it links to those that there are
    for message in (Ping(1), Hello(3), Fatal("no"), ProposeReply(1, ())):
        channel.send(name, message)
    cluster.network.run_for(1.0)
    assert server.counters["unexpected_messages"] == 4


def test_messages_of_other_kinds_are_counted_at_a_target_worker() -> None:
    cluster = Cluster(Faults(), num_drafters=0)
    stranger = cluster.network.open(PeerId("stranger"))
    cluster.network._channels[PeerId("target")].admit([stranger.address])
    stranger.connect(cluster.network._channels[PeerId("target")].address)
    for message in (Ping(1), Release(()), ProposeReply(1, ())):
        stranger.send(PeerId("target"), message)
    cluster.network.run_for(1.0)
    assert cluster.target_server.counters["unexpected_messages"] == 3
