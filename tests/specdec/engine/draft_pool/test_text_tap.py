"""What draft workers hear of texts, and weights that they take between two batches."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from specdec.core.ids import RequestId
from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.sampling_params import SamplingParams
from specdec.engine.draft_pool.server import DraftServer
from specdec.engine.draft_pool.text_tap import LearnableText, TextTap
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyModel
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.online_config import OnlineConfig
from specdec.sampling.sampler import Sampler
from specdec.transport.base import PeerId
from specdec.transport.memory import Faults
from specdec.transport.messages import DraftOpening, ProposeEntry, ProposeRequest, Release
from tests.specdec.engine.draft_pool.server_bench import Bench
from tests.specdec.engine.remote_cluster import Cluster, a_request, expected
from tests.specdec.proposers.contract import FrozenView

ALICE, BOB = "a" * 64, "b" * 64
MODEL = ToyModel(24, seed=3)
PARAMS = SamplingParams(temperature=0.9)


class Tapped(Bench):
    """A bench whose draft server tells a tap of texts that end."""

    def __init__(self, config: OnlineConfig) -> None:
        proposer = DraftModelProposer(ToyRunner(MODEL), DraftChoice(sampler=Sampler(), vocab_size=24))
        super().__init__(proposer)
        self.tap = TextTap(config)
        channel = self.server._channel
        self.server = DraftServer(channel, proposer, tap=self.tap, clock=self.network.clock)

    def ask(
        self, name: str, tokens: Sequence[int], *, base_len: int = 0, owner: str | None = None, wrong: int = 0
    ) -> None:
        opening = DraftOpening(PARAMS, 7, 2, owner=owner) if base_len == 0 else None
        entry = ProposeEntry(
            request_id=RequestId(name),
            epoch=1,
            committed_len=len(tokens),
            prefix_hash=extend_prefix_hash(EMPTY_PREFIX, tokens) + wrong,
            num_draft_tokens=3,
            base_len=base_len,
            token_ids=tuple(tokens[base_len:]),
            opening=opening,
        )
        self.channels[0].send(PeerId("draft"), ProposeRequest(1, (entry,)))
        self.serve()

    def end(self, name: str, *, has_ended: bool = True) -> Sequence[LearnableText]:
        self.channels[0].send(PeerId("draft"), Release(((RequestId(name), 1),), has_ended))
        self.serve()
        return self.tap.take()


def test_a_text_is_heard_when_its_sequence_ends() -> None:
    bench = Tapped(OnlineConfig(tenants=(ALICE,)))
    bench.ask("a", (1, 2, 3), owner=ALICE)
    bench.ask("a", (1, 2, 3, 4, 5), base_len=3)
    assert bench.tap.take() == ()
    (text,) = bench.end("a")
    assert (text.owner, text.token_ids, text.num_prompt_tokens, text.seed) == (ALICE, (1, 2, 3, 4, 5), 2, 7)


def test_a_text_is_not_heard_where_its_sequence_only_moves() -> None:
    bench = Tapped(OnlineConfig(allow_shared=True))
    bench.ask("a", (1, 2, 3, 4))
    assert bench.end("a", has_ended=False) == ()
    bench.ask("a", (1, 2, 3, 4, 5))
    (text,) = bench.end("a")
    assert text.token_ids == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("owner", [BOB, None], ids=["another key", "no key"])
def test_a_text_of_somebody_else_is_not(owner: str | None) -> None:
    bench = Tapped(OnlineConfig(tenants=(ALICE,)))
    bench.ask("b", (1, 2, 3, 4), owner=owner)
    assert bench.end("b") == ()


def test_tokens_that_are_not_those_of_their_hash_are_not_learnt_from() -> None:
    bench = Tapped(OnlineConfig(allow_shared=True))
    bench.ask("a", (1, 2, 3))
    bench.ask("a", (1, 2, 3, 9), base_len=3, wrong=1)
    assert bench.server.counters["restarts_asked"] == 1
    assert bench.end("a") == ()


def test_coordinators_are_told_what_was_counted_elsewhere() -> None:
    cluster = Cluster(Faults())
    (server,) = cluster.servers.values()
    server.count({"online_versions_served": 2})
    rng = random.Random(0)
    wanted = [a_request(f"r{index}", rng) for index in range(3)]
    tokens = cluster.run(wanted)
    server.count({"online_versions_served": 1})
    wanted += [last := a_request("last", rng)]
    tokens |= cluster.run([last])
    assert cluster.proposer.counters["online_versions_served"] == 3
    assert tokens == {one.request_id: expected(one) for one in wanted}


def test_something_is_done_between_two_batches_only() -> None:
    bench = Tapped(OnlineConfig(allow_shared=True))
    seen: list[int] = []
    bench.server.before_next(lambda: seen.append(bench.server.counters["rounds"]))
    assert seen == []
    bench.ask("a", (1, 2, 3))
    bench.ask("a", (1, 2, 3, 4), base_len=3)
    assert seen == [0]


def test_nobody_who_begins_finds_what_former_weights_have_read() -> None:
    """Who has begun goes on with it; its blocks are not for others either, once it ends."""
    runner = ToyRunner(MODEL, block_size=2)
    proposer = DraftModelProposer(runner, DraftChoice(sampler=Sampler(), vocab_size=24))

    def num_read(name: str, tokens: Sequence[int]) -> int:
        before = runner.num_tokens_read
        one = dataclasses.replace(FrozenView(RequestId(name), tuple(tokens)))
        proposer.propose([one], {one.request_id: 1})
        proposer.check_integrity()
        return runner.num_tokens_read - before

    prompt = tuple(range(1, 12))
    assert num_read("a", prompt) == 11
    assert num_read("b", prompt) == 1
    proposer.sequences.renew()
    assert num_read("a", (*prompt, 5)) <= 2  # as without other weights
    assert num_read("c", prompt) == 11
    assert num_read("d", prompt) == 1
    proposer.release([RequestId("a"), RequestId("c"), RequestId("d")])
    assert num_read("e", prompt) == 1
