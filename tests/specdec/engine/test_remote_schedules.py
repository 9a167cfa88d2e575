"""An engine whose target and drafters are behind a bad network writes what the model alone would write."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from specdec.core.ids import RequestId
from specdec.proposers.ngram import NgramProposer
from specdec.scheduling.speculation.controller import FixedController
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.state import Schedulable
from specdec.transport.memory import Faults
from tests.pairwise import mostly_full
from tests.specdec.engine.random_schedules import MODES, assert_nothing_is_left, run_random_schedule
from tests.specdec.engine.remote_cluster import CAPABILITIES, VOCAB, Cluster, a_request, expected
from tests.specdec.engine.tree_drafters import Bushy


@pytest.mark.parametrize(
    ("mode", "has_trees"), [*((mode, False) for mode in MODES), ("lockstep", True), ("ping_pong", True)]
)
def test_drafts_that_are_shorter_than_asked_for_change_no_token(mode: OverlapMode, has_trees: bool) -> None:
    cluster = Cluster(
        Faults(delay_s=(0.0, 0.01)),
        mode=mode,
        capabilities=replace(CAPABILITIES, shape="tree", looks_ahead=False) if has_trees else CAPABILITIES,
        around=partial(Bushy, vocab_size=VOCAB) if has_trees else None,
        num_draft_tokens=8,
        max_draft_tokens=3,
    )
    rng = random.Random(5)
    requests = [a_request(f"r{index}", rng) for index in range(8)]
    assert cluster.run(requests) == {request.request_id: expected(request) for request in requests}
    (server,) = cluster.servers.values()
    assert server.counters["shortened_entries"] > 0
    metrics = cluster.engine.metrics()
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens <= 3 * metrics.num_drafts
    assert not metrics.proposals_dropped
    assert cluster.proposer.counters.get("invalid_drafts_dropped", 0) == 0
    assert_nothing_is_left(cluster)


class Restless(FixedController):
    """Another mode, k and fan-out now and then, drawn by lot; k for each request apart, often 0."""

    def __init__(self, seed: int) -> None:
        super().__init__(4)
        self._lot = random.Random(seed)
        self.num_by_change: Counter[tuple[OverlapMode, OverlapMode]] = Counter()

    def choose(self, decoding: Sequence[Schedulable], elsewhere: Sequence[Schedulable] = ()) -> list[int]:
        before = self._mode
        if self._lot.random() < 0.5:
            self._mode = self._lot.choice(MODES)
        self.num_by_change[before, self._mode] += 1
        return [self._lot.choice((0, 0, 1, 2, 4)) for _ in decoding]

    def fan_out(
        self, request: Schedulable, num_pending: int, max_branches: int, *, is_foreign: bool = False
    ) -> tuple[int, ...]:
        if self._lot.random() < 0.2:
            return (0,) * (num_pending + 1)
        return super().fan_out(request, num_pending, max_branches, is_foreign=is_foreign)


@pytest.mark.cover(1)
@pytest.mark.parametrize("block", mostly_full(range(64), [0]))
@pytest.mark.parametrize("has_fallback", [False, True])
def test_modes_that_change_amid_requests_never_change_a_token(block: int, has_fallback: bool) -> None:
    num_accepted, num_by_change = 0, Counter[tuple[OverlapMode, OverlapMode]]()
    for seed in range(15 * block, 15 * block + 15):
        controller = Restless(seed)
        fallback = NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3) if has_fallback else None
        num_accepted += run_random_schedule(seed, controller=controller, fallback=fallback)[1]
        num_by_change.update(controller.num_by_change)
    assert num_accepted > 50, "the drafters hardly ever helped: these schedules prove nothing"
    assert len(num_by_change) == len(MODES) ** 2
    assert min(num_by_change.values()) > 5


@pytest.mark.cover(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", mostly_full(range(8), range(4)))
def test_random_schedules_never_change_a_token(block: int, mode: OverlapMode) -> None:
    num_accepted = 0
    for seed in range(50 * block, 50 * block + 50):
        num_accepted += run_random_schedule(seed, mode)[1]
    assert num_accepted > 500, "the drafters hardly ever helped: these schedules prove nothing"


@pytest.mark.parametrize("mode", ["lockstep", "ping_pong"])
def test_random_schedules_with_trees(mode: OverlapMode) -> None:
    """Trees of draft workers, their parents in the messages, and moves in those to the target."""
    num_accepted = num_moved = 0
    for seed in range(25):
        cluster, accepted = run_random_schedule(seed, mode, has_trees=True)
        num_accepted += accepted
        num_moved += cluster.engine.metrics().num_moved_kv
    assert num_accepted > 300
    assert num_moved > 60


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lockstep", "ping_pong"])
@pytest.mark.parametrize("block", range(1, 20))
def test_many_more_random_schedules_with_trees(block: int, mode: OverlapMode) -> None:
    for seed in range(100 * block, 100 * block + 100):
        run_random_schedule(seed, mode, has_trees=True)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", range(8, 72))
def test_many_more_random_schedules(block: int, mode: OverlapMode) -> None:
    for seed in range(100 * block, 100 * block + 100):
        run_random_schedule(seed, mode)


def test_the_schedules_would_catch_a_drafter_that_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: commit what was proposed instead of what the target says."""
    import specdec.engine.rounds.round as round_module
    from specdec.core.proposal import Verdict

    def believe(drafted: Sequence[int], parents: None, chosen: Sequence[int]) -> Verdict:
        return Verdict(accepted_nodes=tuple(range(len(drafted))), token_ids=(*drafted, chosen[-1]))

    monkeypatch.setattr(round_module, "verdict_of", believe)
    with pytest.raises(AssertionError):
        any(run_random_schedule(seed)[1] < 0 for seed in range(10))


def test_the_schedules_would_catch_what_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: one sequence is never given up."""
    from specdec.engine.draft_pool.remote_proposer import RemoteProposer

    own = RemoteProposer.release

    def forgetful(self: RemoteProposer, request_ids: Iterable[RequestId]) -> None:
        own(self, [one for one in request_ids if one != "r3"])

    monkeypatch.setattr(RemoteProposer, "release", forgetful)
    with pytest.raises(AssertionError, match="r3"):
        any(run_random_schedule(seed)[1] < 0 for seed in range(10))
