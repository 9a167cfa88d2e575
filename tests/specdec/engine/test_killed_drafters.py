"""Processes that draft are killed at random during 500 requests: all finish, and all tokens are right.

And drafting comes back. No clock is looked at: what is compared is which part of the tokens came from drafts,
and how many tokens a round brings.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.engine.draft_pool.patience import DraftDeadlineConfig
from specdec.engine.draft_pool.remote_proposer import RemoteProposer
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyTarget, ToyTokenizer
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.transport.base import PeerId
from specdec.transport.zmq import ZmqChannel
from tests.specdec.engine.draft_nursery import DraftNursery
from tests.specdec.engine.remote_cluster import CAPABILITIES, MODEL, VOCAB, a_request, expected

NUM_DRAFTERS = 3
MODES: tuple[OverlapMode, ...] = ("lockstep", "ping_pong", "draft_ahead")
ALSO: dict[OverlapMode, list[pytest.MarkDecorator]] = {
    "lockstep": [pytest.mark.full],
    "ping_pong": [pytest.mark.full],
    "draft_ahead": [],
}
# Nobody who lives is late, however busy the machine; the dead are noticed by their links.
DEADLINES = DraftDeadlineConfig(
    min_deadline_s=20.0, max_deadline_s=30.0, first_retry_s=0.01, max_retry_s=0.05, reassign_after_s=0.0
)


class Stretch(NamedTuple):
    """What a part of the requests has brought."""

    num_tokens: int
    num_accepted: int
    num_fallbacks: int
    num_rounds: int
    num_verified: int
    """Requests, added up over rounds."""

    def since(self, earlier: Stretch) -> Stretch:
        return Stretch(*(now - then for now, then in zip(self, earlier, strict=True)))

    @property
    def drafted_share(self) -> float:
        """Which part of the tokens were draft tokens that stood."""
        return self.num_accepted / self.num_tokens

    @property
    def accepted_per_round(self) -> float:
        return self.num_accepted / self.num_rounds

    @property
    def tokens_per_verification(self) -> float:
        """How far a request gets in a round that it takes part in."""
        return self.num_tokens / self.num_verified

    @property
    def fallback_share(self) -> float:
        """For how many sequences drafts were wanted in vain in a round, over tokens."""
        return self.num_fallbacks / self.num_tokens


class Killing:
    """An engine whose draft workers are other processes."""

    def __init__(self, mode: OverlapMode, seed: int) -> None:
        self.rng = random.Random(seed)
        channel = ZmqChannel(PeerId("coordinator"))
        self.nursery = DraftNursery(channel.address)
        self.proposer = RemoteProposer(
            channel, capabilities=CAPABILITIES, vocab_size=VOCAB, deadlines=DEADLINES
        )
        self.engine = Engine.from_parts(
            target=ToyTarget(MODEL, num_blocks=64),
            proposer=self.proposer,
            tokenizer=ToyTokenizer.of_letters(VOCAB),
            scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=24),
            controller=FixedController(4, mode=mode),
        )
        self.tokens: dict[RequestId, list[int]] = {}
        self.num_killed = 0
        self.replace_all()

    def replace_all(self) -> None:
        """Begin as many as have died, and say who there is."""
        while len(self.nursery.alive) < NUM_DRAFTERS:
            self.nursery.begin()
        self.proposer.set_workers(self.nursery.addresses)

    def kill_one(self) -> None:
        """Kill one; those in charge may have noticed, or not yet."""
        self.nursery.kill(self.rng.choice(list(self.nursery.alive)))
        self.num_killed += 1
        if self.rng.random() < 0.5:
            self.proposer.set_workers(self.nursery.addresses)

    def serve(self, requests: list[Request], *, is_killing: bool, is_replacing: bool = True) -> Stretch:
        """Serve requests, six at a time."""
        before = self.so_far()
        waiting, active = list(requests), list[Request]()
        self.tokens.update({request.request_id: [] for request in requests})
        while waiting or self.engine.has_work:
            active = [
                one for one in active if len(self.tokens[one.request_id]) < (one.params.max_tokens or 0)
            ]
            while waiting and len(active) < 6:
                active.append(waiting.pop())
                self.engine.add_request(active[-1])
            if is_killing and self.nursery.alive and self.rng.random() < 0.2:
                self.kill_one()
            elif is_killing and is_replacing and self.rng.random() < 0.04:
                self.replace_all()
            for output in self.engine.step():
                assert output.error is None, output.error
                assert output.first_index == len(self.tokens[output.request_id])
                self.tokens[output.request_id].extend(output.token_ids)
        self.engine.check_integrity()
        for request in requests:
            assert self.tokens[request.request_id] == expected(request), request
        return self.so_far().since(before)

    def so_far(self) -> Stretch:
        metrics = self.engine.metrics()
        return Stretch(
            sum(map(len, self.tokens.values())),
            metrics.num_accepted_tokens,
            int(self.proposer.counters.get("fallback_requests", 0)),
            metrics.num_rounds,
            metrics.num_verified_requests,
        )

    def close(self) -> None:
        self.engine.close()
        self.nursery.close()


@contextmanager
def killing(mode: OverlapMode, seed: int = 0) -> Iterator[Killing]:
    cluster = Killing(mode, seed)
    try:
        yield cluster
    finally:
        cluster.close()


def some_requests(number: int, name: str) -> list[Request]:
    """The same ones for every name."""
    rng = random.Random(1)
    return [a_request(f"{name}-{index}", rng) for index in range(number)]


@pytest.mark.parametrize("mode", [pytest.param(one, marks=ALSO[one]) for one in MODES])
def test_processes_that_draft_are_killed_at_random_during_500_requests(mode: OverlapMode) -> None:
    with killing(mode) as cluster:
        before = cluster.serve(some_requests(120, "before"), is_killing=False)
        during = cluster.serve(some_requests(500, "during"), is_killing=True)
        cluster.replace_all()
        after = cluster.serve(some_requests(120, "after"), is_killing=False)
    assert cluster.num_killed >= 40
    assert before.drafted_share > 0.3
    assert during.drafted_share < 0.9 * before.drafted_share, "it did not hurt: this proves nothing"
    assert during.num_fallbacks > 100
    assert after.drafted_share > 0.95 * before.drafted_share
    assert after.fallback_share < before.fallback_share + 0.02
    assert during.accepted_per_round < 0.9 * before.accepted_per_round
    assert after.accepted_per_round > 0.95 * before.accepted_per_round
    assert after.tokens_per_verification > 0.95 * before.tokens_per_verification


def test_without_new_processes_drafting_does_not_come_back() -> None:
    """Negative control."""
    with killing("lockstep") as cluster:
        before = cluster.serve(some_requests(40, "before"), is_killing=False)
        cluster.serve(some_requests(60, "during"), is_killing=True, is_replacing=False)
        after = cluster.serve(some_requests(40, "after"), is_killing=False)
    assert cluster.num_killed == NUM_DRAFTERS
    assert before.drafted_share > 0.3
    assert after.drafted_share == 0.0
