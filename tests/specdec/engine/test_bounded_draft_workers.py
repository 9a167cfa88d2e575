"""Bounded draft models in draft workers: long prompts, bad networks, deaths, aborts, pools of few blocks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec
import pytest
import torch

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.draft_pool.shares import DraftShareConfig
from specdec.engine.targets.toy_runner import ToyRunner
from specdec.engine.targets.toy_target import ToyTarget
from specdec.kv.selection import KvBudget, KvSelectionConfig, budgets_of
from specdec.model.batch import SequenceSlice
from specdec.proposers.base import Proposer
from specdec.proposers.draft_choice import DraftChoice
from specdec.proposers.draft_model import DraftModelProposer
from specdec.proposers.draft_sequences import DraftReading
from specdec.proposers.draft_window import DraftWindow
from specdec.proposers.ngram import NgramProposer
from specdec.sampling.sampler import Sampler
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.transport.memory import Faults
from tests.specdec.engine.draft_pool.wanted_drafts import budgets, sequence
from tests.specdec.engine.random_schedules import random_faults
from tests.specdec.engine.remote_cluster import MODEL, OTHER_MODEL, VOCAB, Cluster, expected

BUDGET, SINK, PIECE, BLOCK = 16, 4, 8, 4
MODES: tuple[OverlapMode, ...] = ("lockstep", "ping_pong", "draft_ahead")


class CountingRunner(ToyRunner):
    """Knows few positions, if so told, and keeps book of what its rows attend to."""

    def __init__(self, num_blocks: int, num_positions: int | None) -> None:
        super().__init__(OTHER_MODEL, num_blocks=num_blocks, max_model_len=num_positions or 1 << 20)
        self.num_attended = 0
        self.most_attended = 0

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        for one in slices:
            end = one.start + one.num_dropped + len(one.token_ids)
            assert end + (0 if one.shift is None else one.shift.offset) <= self.max_model_len
            reach = one.start + len(one.token_ids)
            self.num_attended += sum(range(one.start + 1, reach + 1))
            self.most_attended = max(self.most_attended, reach)
        return super().forward(slices)


class Drafters:
    """Makes the proposers of draft workers, and remembers them."""

    def __init__(self, *, num_blocks: int = 256, in_cache: bool, bounded: bool = True) -> None:
        self._num_blocks = num_blocks
        self._num_positions = 64 if in_cache else None
        self._bounded = bounded
        self.made: list[DraftModelProposer] = []
        self.runners: list[CountingRunner] = []

    def __call__(self) -> Proposer:
        config = KvSelectionConfig(policy="streaming", budget=BUDGET, sink_tokens=SINK)
        window = DraftWindow(
            selection=config.make(BLOCK),
            num_piece_tokens=PIECE,
            num_draft_tokens=9,
            num_positions=self._num_positions,
        )
        runner = CountingRunner(self._num_blocks, self._num_positions)
        proposer = DraftModelProposer(
            runner,
            DraftChoice(sampler=Sampler(), vocab_size=VOCAB),
            reading=DraftReading(max_read_tokens=48, window=window if self._bounded else None),
        )
        self.runners.append(runner)
        self.made.append(proposer)
        return proposer

    def check(self) -> None:
        for one in self.made:
            one.check_integrity()


def long_target(clock: ManualClock, num_blocks: int = 400) -> ToyTarget:
    return ToyTarget(MODEL, num_blocks=num_blocks, max_model_len=1200)


def long_request(name: str, rng: random.Random) -> Request:
    length = rng.choice([3, 30, 150, 400])
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=tuple(rng.choices(range(VOCAB), k=length)),
        params=SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]), max_tokens=rng.randint(1, 40), ignore_eos=True
        ),
        seed=rng.getrandbits(64),
    )


def run_random_schedule(seed: int, mode: OverlapMode, *, in_cache: bool) -> tuple[int, int]:
    """Five requests, some of them given up in the middle; return accepted drafts and windows read again."""
    rng = random.Random(seed)
    drafters = Drafters(num_blocks=rng.choice([14, 30, 256]), in_cache=in_cache)
    cluster = Cluster(
        random_faults(rng),
        seed,
        num_drafters=rng.randint(0, 2),
        mode=mode,
        make_drafter=drafters,
        make_target=lambda clock: long_target(clock, rng.choice([150, 400])),
    )
    requests = [long_request(f"r{index}", rng) for index in range(5)]
    tokens: dict[RequestId, list[int]] = {request.request_id: [] for request in requests}
    waiting, aborted = list(requests), set()
    while waiting or cluster.engine.has_work:
        if waiting and (rng.random() < 0.3 or not cluster.engine.has_work):
            cluster.engine.add_request(waiting.pop())
        fate = rng.random()
        if fate < 0.03 and cluster.drafters:
            cluster.stop_drafter(rng.choice(list(cluster.drafters)), told=rng.random() < 0.5)
        elif fate < 0.07:
            cluster.start_drafter()
        elif fate < 0.1:
            cluster.network.faults = random_faults(rng)
        elif fate < 0.12:
            name = rng.choice(requests).request_id
            if name in cluster.engine._roster.running and name not in aborted:
                aborted.add(name)
                cluster.engine.abort(name)
        if cluster.engine.has_work:
            cluster.step(tokens)
        drafters.check()
    for request in requests:
        name, whole = request.request_id, expected(request)
        assert tokens[name] == (whole[: len(tokens[name])] if name in aborted else whole), (seed, request)
    num_accepted = cluster.engine.metrics().num_accepted_tokens
    cluster.network.faults = Faults()
    cluster.run([long_request("last", random.Random(0))])  # what was in flight has landed
    cluster.network.run_for(10.0)
    cluster.network.run_for(DraftShareConfig().lease_s + 1.0)
    for name, server in cluster.servers.items():
        server.step(0)
        assert server.num_sequences == 0, name
        its = drafters.made[int(name.removeprefix("draft-")) - 1]
        assert its.sequences.num_held_blocks == 0, name
    num_reread = sum(int(one.counters["draft_windows_reread"]) for one in drafters.made)
    return num_accepted, num_reread


@pytest.mark.cover(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("in_cache", [False, True])
def test_random_schedules_never_change_a_token(mode: OverlapMode, in_cache: bool) -> None:
    outcomes = [run_random_schedule(seed, mode, in_cache=in_cache) for seed in range(6)]
    assert sum(num_accepted for num_accepted, _ in outcomes) > 100
    assert (sum(num_reread for _, num_reread in outcomes) > 5) == in_cache


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("in_cache", [False, True])
@pytest.mark.parametrize("block", range(9))
def test_many_more_random_schedules(mode: OverlapMode, in_cache: bool, block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        run_random_schedule(seed, mode, in_cache=in_cache)


@pytest.mark.parametrize("in_cache", [False, True])
def test_a_long_prompt_is_never_attended_to_as_a_whole(in_cache: bool) -> None:
    """Counted in pairs of rows and what they attend to: so many for each token, not for each pair of them."""
    length, most = 1000, BUDGET + 2 * BLOCK + PIECE + 9
    found: dict[bool, CountingRunner] = {}
    for bounded in (True, False):
        drafters = Drafters(num_blocks=400, in_cache=in_cache and bounded, bounded=bounded)
        cluster = Cluster(Faults(), make_drafter=drafters)
        one = sequence("a", prompt=length)
        for _ in range(60):
            if cluster.proposer.propose([one], budgets(one)):
                break
            cluster.network.run_for(0.1)
        else:
            pytest.fail("it was never drafted for")
        (found[bounded],) = drafters.runners
    assert found[False].num_attended > length * length / 2
    assert found[True].num_attended < length * most
    assert found[True].most_attended <= most
    if in_cache:
        assert found[True].num_attended < most * most
        assert found[True].num_tokens_read < BUDGET + 2 * BLOCK + 9


@pytest.mark.parametrize("in_cache", [False, True])
def test_nobody_waits_for_a_draft_model_that_reads_a_long_prompt(in_cache: bool) -> None:
    """Not the first token of the request, nor the rounds of others: answers take half a second here."""
    drafters = Drafters(in_cache=in_cache)
    cluster = Cluster(Faults(), make_drafter=drafters, make_target=long_target)
    cluster.network.faults = Faults(delay_s=(0.5, 0.5))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompt = tuple(random.Random(1).choices(range(VOCAB), k=600))
    cluster.engine.add_request(
        Request(request_id=RequestId("a"), prompt_token_ids=prompt, params=params, seed=1)
    )
    tokens: dict[RequestId, list[int]] = {RequestId("a"): []}
    while not tokens[RequestId("a")]:
        cluster.step(tokens)
    metrics = cluster.engine.metrics()
    assert metrics.num_rounds >= 600 / 16, "read by the target in chunks"
    assert metrics.draft_s == 0.0, "no round of the prompt has waited"
    (runner,) = drafters.runners
    assert runner.num_tokens_read > 0, "it was read meanwhile"


@pytest.mark.parametrize("in_cache", [False, True])
def test_a_worker_that_is_started_anew_drafts_again(in_cache: bool) -> None:
    drafters = Drafters(in_cache=in_cache)
    cluster = Cluster(Faults(), make_drafter=drafters)
    one = sequence("a", prompt=500)

    def rounds_without_drafts() -> int:
        for number in range(100):
            if cluster.proposer.propose([one], budgets(one)):
                return number
            cluster.network.run_for(0.05)
            one.commit((number % VOCAB,))
        pytest.fail("it was never drafted for")

    first = rounds_without_drafts()
    for _ in range(40):
        one.commit((1, 2, 3))
        assert cluster.proposer.propose([one], budgets(one)) or in_cache, "but when it reads its window again"
        cluster.network.run_for(0.05)
    cluster.stop_drafter(next(iter(cluster.drafters)), told=True)
    cluster.start_drafter()
    again = rounds_without_drafts()
    if in_cache:
        assert first <= 2
        assert again <= 2
        assert drafters.runners[-1].num_tokens_read < 2 * BUDGET + 3 * BLOCK + 9, "a window, not the text"
    drafters.check()


def run_with_changing_picks(seed: int) -> set[int]:
    """Lookups in the coordinator beside a draft model elsewhere, whose window changes every few rounds.

    Returns what it was told to keep.
    """
    rng = random.Random(seed)
    kv = KvSelectionConfig(policy="streaming", budget=(BUDGET, 48, 0.5), sink_tokens=SINK, floor=BUDGET)
    told: list[tuple[str, int, int]] = []

    class Told(Drafters):
        """Notes what each sequence is to be kept by."""

        def __call__(self) -> Proposer:
            made = super().__call__()
            propose = made.propose

            def watched(
                views: Sequence[SequenceView], its: Mapping[RequestId, int]
            ) -> dict[RequestId, Proposal]:
                told.extend((view.request_id, view.committed_len, view.kv_budget) for view in views)
                return propose(views, its)

            made.propose = watched  # type: ignore[method-assign]
            return made

    drafters, budgets = Told(num_blocks=rng.choice([30, 256]), in_cache=seed % 2 == 1), budgets_of(kv, 4)
    cluster = Cluster(
        random_faults(rng),
        seed,
        num_drafters=2,
        make_drafter=drafters,
        make_target=lambda clock: long_target(clock, rng.choice([150, 400])),
        beside={"lookup": NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3)},
        kv_budgets=budgets,
    )
    assert cluster.choice is not None
    assert budgets is not None
    had: dict[RequestId, tuple[int, KvBudget]] = {}

    def picked(name: RequestId) -> tuple[int, KvBudget]:
        return had.setdefault(name, (rng.randrange(2), rng.choice(kv.budgets)))

    cluster.choice.pick = lambda name, _: picked(name)[0]
    budgets.pick = lambda name, _: picked(name)[1]
    requests = [long_request(f"r{index}", rng) for index in range(6)]
    requests[1] = msgspec.structs.replace(requests[1], kv_budget=20)
    requests[4] = msgspec.structs.replace(requests[4], drafter="lookup")
    tokens: dict[RequestId, list[int]] = {one.request_id: [] for one in requests}
    for one in requests:
        cluster.engine.add_request(one)
    while cluster.engine.has_work:
        if rng.random() < 0.3:
            had.clear()
        if rng.random() < 0.1:
            cluster.network.faults = random_faults(rng)
        cluster.step(tokens)
        drafters.check()
    for one in requests:
        assert tokens[one.request_id] == expected(one), one
    by_request = {
        one.request_id: [(length, budget) for name, length, budget in told if f"{one.request_id}/" in name]
        for one in requests
    }
    assert {budget for _, budget in by_request[RequestId("r1")]} <= {20}
    assert not by_request[RequestId("r4")], "it never asked for any"
    free = [seen for name in ("r0", "r2", "r3", "r5") for seen in by_request[RequestId(name)]]
    assert all(budget in {one.tokens(length) for one in kv.budgets} for length, budget in free)
    return {budget for _, budget in free}


def test_drafters_and_budgets_that_change_reach_draft_workers_and_change_no_token() -> None:
    told = set().union(*(run_with_changing_picks(seed) for seed in range(4)))
    assert {BUDGET, 48} < told
    assert max(told) > 150, "half of a long text"


def test_texts_too_long_are_counted_once() -> None:
    """At whoever knows it: the coordinator, or the draft model in its process; with few positions in cache
    there are none.
    """
    runner = ToyRunner(OTHER_MODEL, num_blocks=256, max_model_len=40)
    cluster = Cluster(
        Faults(),
        make_drafter=lambda: DraftModelProposer(runner, DraftChoice(sampler=Sampler(), vocab_size=VOCAB)),
    )
    own = DraftModelProposer(
        ToyRunner(OTHER_MODEL, max_model_len=40), DraftChoice(sampler=Sampler(), vocab_size=VOCAB)
    )
    long, short = sequence("long", prompt=35), sequence("short", prompt=3)
    for proposer in (cluster.proposer, own):
        found = 2
        for _ in range(10):
            found = len(proposer.propose([long, short], budgets(long, short)))
            cluster.network.run_for(0.1)
            long.commit((1, 2))
        assert found == 1
        assert proposer.counters["draft_sequences_too_long"] == 1
    own.release([long.request_id])
    own.propose([long], budgets(long))
    assert own.counters["draft_sequences_too_long"] == 2, "another request by that name"
    in_cache = Drafters(in_cache=True)()
    assert len(in_cache.propose([long, short], budgets(long, short))) == 2
    assert in_cache.counters["draft_sequences_too_long"] == 0  # type: ignore[attr-defined]
