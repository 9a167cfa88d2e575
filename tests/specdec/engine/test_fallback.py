"""An n-gram lookup that stands in for drafts that did not come: the same tokens, whatever dies."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from specdec.core.distributions import TokenDistribution
from specdec.core.ids import RequestId
from specdec.core.proposal import Proposal
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.metrics.engine_metrics import EngineMetrics
from specdec.engine.rounds.timed_controller import TimedController
from specdec.engine.targets.toy_target import ToyModel
from specdec.proposers.base import Proposer
from specdec.proposers.fallback import FallbackProposer
from specdec.proposers.lookup_config import SuffixConfig
from specdec.proposers.ngram import NgramProposer
from specdec.proposers.suffix import SuffixProposer
from specdec.scheduling.speculation.controller import DraftOutcome, FixedController, RoundObservation
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.transport.memory import Faults
from tests.pairwise import mostly_full
from tests.specdec.engine import toy_engines
from tests.specdec.engine.judged_engines import LOSSLESS, drafter_for, engine_of
from tests.specdec.engine.random_schedules import MODES, run_random_schedule
from tests.specdec.engine.remote_cluster import Cluster, a_request, expected
from tests.specdec.engine.stream_frequencies import TINY_DRAFT, p_value


def ngram() -> NgramProposer:
    return NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3)


def repetitive(name: str, rng: random.Random) -> Request:
    """A request over three tokens: a lookup finds something nearly always."""
    prompt = tuple(rng.choices(range(3), k=rng.randint(4, 24)))
    params = SamplingParams(temperature=rng.choice([0.0, 0.7, 1.0]), max_tokens=rng.randint(8, 24))
    return replace(a_request(name, rng), prompt_token_ids=prompt, params=params)


def run_with(fallback: Proposer, seed: int, mode: OverlapMode) -> EngineMetrics:
    """Five requests that repeat themselves, through a random schedule."""
    cluster, _ = run_random_schedule(seed, mode, fallback=fallback, make_request=repetitive)
    return cluster.engine.metrics()


def accepted_by(metrics: EngineMetrics, method: str) -> int:
    counts = metrics.by_method().get(method)
    return 0 if counts is None else counts.num_accepted_tokens


@pytest.mark.parametrize("mode", mostly_full(MODES, ["draft_ahead"]))
@pytest.mark.parametrize("block", [0, *(pytest.param(one, marks=pytest.mark.full) for one in range(1, 4))])
def test_random_schedules_never_change_a_token(block: int, mode: OverlapMode) -> None:
    num_drafted = num_stood_in = 0
    for seed in range(40 * block, 40 * block + 40):
        metrics = run_with(ngram(), seed, mode)
        num_stood_in += accepted_by(metrics, "ngram")
        num_drafted += accepted_by(metrics, "toy")
    assert num_stood_in > 100, "nothing stood in: these schedules prove nothing"
    assert num_drafted > 100


@pytest.mark.cover(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_first", [False, True], ids=["stands in", "goes first"])
def test_lookups_that_remember_never_change_a_token(mode: OverlapMode, is_first: bool) -> None:
    """Before the draft workers or after them; what one request has said is found by the next."""
    lookup = SuffixProposer(SuffixConfig(min_match_tokens=4 if is_first else 1))
    num_drafted = num_looked_up = num_of_others = 0
    for seed in range(12):
        cluster, _ = run_random_schedule(
            seed, mode, fallback=lookup, is_fallback_first=is_first, make_request=repetitive
        )
        metrics = cluster.engine.metrics()
        num_looked_up += accepted_by(metrics, "suffix")
        num_of_others += accepted_by(metrics, "suffix_shared")
        num_drafted += accepted_by(metrics, "toy")
    assert min(num_drafted, num_looked_up, num_of_others) > 10, "somebody was not heard: these prove nothing"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block", range(4, 40))
def test_many_more_random_schedules(block: int, mode: OverlapMode) -> None:
    for seed in range(50 * block, 50 * block + 50):
        run_with(ngram(), seed, mode)


class Unasked(NgramProposer):
    """Names a prefix that is not the sequence's."""

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        made = super().propose(sequences, num_draft_tokens)
        return {name: replace(one, prefix_hash=one.prefix_hash ^ 1) for name, one in made.items()}


def test_what_stands_in_for_another_prefix_is_dropped() -> None:
    metrics = run_with(Unasked(prompt_lookup_min=1, prompt_lookup_max=3), 1, "draft_ahead")
    assert metrics.proposals_dropped["stale"] > 0
    assert accepted_by(metrics, "ngram") == 0


def test_control_what_stands_in_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: commit what was looked up instead of what the target says."""
    import specdec.engine.rounds.round as round_module
    from specdec.core.proposal import Verdict

    def believe(drafted: Sequence[int], parents: None, chosen: Sequence[int]) -> Verdict:
        return Verdict(accepted_nodes=tuple(range(len(drafted))), token_ids=(*drafted, chosen[-1]))

    rng = random.Random(5)
    cluster = Cluster(Faults(), num_drafters=0, fallback=ngram())
    request = repetitive("r", rng)
    assert cluster.run([request])[request.request_id] == expected(request)
    monkeypatch.setattr(round_module, "verdict_of", believe)
    cluster = Cluster(Faults(), num_drafters=0, fallback=ngram())
    assert cluster.run([request])[request.request_id] != expected(request)


def test_the_pending_chain_of_a_lookup_is_looked_ahead_behind() -> None:
    """On a miss the draft workers prepare for verdicts on what was looked up, and are right about some."""
    rng = random.Random(2)
    cluster = Cluster(Faults(), mode="draft_ahead", fallback=ngram())
    asked: list[tuple[bool, int]] = []
    look_ahead = cluster.proposer.look_ahead
    outcomes = []
    take_outcomes = cluster.proposer.take_ahead_outcomes

    def spy(wishes: Sequence[object]) -> None:
        asked.extend((wish.is_foreign, len(wish.pending)) for wish in wishes)  # type: ignore[attr-defined]
        look_ahead(wishes)  # type: ignore[arg-type]

    def take() -> Sequence[object]:
        outcomes.extend(taken := take_outcomes())
        return taken

    cluster.proposer.look_ahead = spy  # type: ignore[assignment,method-assign]
    cluster.proposer.take_ahead_outcomes = take  # type: ignore[assignment,method-assign]
    requests = [repetitive(f"r{index}", rng) for index in range(12)]
    tokens = cluster.run(requests)
    assert all(tokens[one.request_id] == expected(one) for one in requests)
    assert any(is_foreign and num_pending > 1 for is_foreign, num_pending in asked)
    foreign = [one for one in outcomes if one.is_foreign]
    assert foreign
    assert any(one.rank is not None for one in foreign), "continuations behind a lookup come true"
    assert any(one.num_accepted > 0 for one in foreign)
    assert {one.is_foreign for one in outcomes} == {True, False}


class Watching(FixedController):
    """Remembers what it was told."""

    def __init__(self, mode: OverlapMode) -> None:
        super().__init__(4, mode)
        self.own: list[DraftOutcome] = []
        self.stand_ins: list[DraftOutcome] = []

    def observe(self, observation: RoundObservation) -> None:
        self.own += observation.outcomes
        self.stand_ins += observation.stand_ins


@pytest.mark.parametrize("mode", MODES)
def test_the_controller_and_the_metrics_tell_them_apart(mode: OverlapMode) -> None:
    cluster = Cluster(Faults(loss=0.2), mode=mode, fallback=ngram())
    controller = Watching(mode)
    cluster.engine._rounds._controller = TimedController(controller, cluster.clock)
    rng = random.Random(4)
    cluster.run([repetitive(f"r{index}", rng) for index in range(8)])
    by_method = cluster.engine.metrics().by_method()
    for method, outcomes in (("toy", controller.own), ("ngram", controller.stand_ins)):
        counts = by_method[method]
        assert counts.num_drafts == len(outcomes) > 0
        assert counts.num_draft_tokens == sum(one.num_drafted for one in outcomes)
        assert counts.num_accepted_tokens == sum(one.num_accepted for one in outcomes)
    snapshot = cluster.engine.metrics().snapshot()
    assert snapshot['spec_decode_num_drafts_by_method{method="ngram"}'] == len(controller.stand_ins)
    total = snapshot["spec_decode_num_drafts"]
    assert total == len(controller.own) + len(controller.stand_ins)


# ---- every rule ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["sample_and_match", *LOSSLESS])
def test_greedy_tokens_are_the_targets(rule: str) -> None:
    similar = ToyModel(toy_engines.VOCAB_SIZE, seed=1, perturbation=0.2)
    requests = [toy_engines.request(f"r{n}", [1 + n % 3, 2, 3, 1, 2], seed=n) for n in range(6)]
    proposer = FallbackProposer(toy_engines.Forgetful(drafter_for(rule, similar)), ngram())
    engine = engine_of(rule, toy_engines.MODEL, proposer, num_draft_tokens=2)
    outputs = toy_engines.run(engine, *requests)
    for one in requests:
        assert toy_engines.tokens_of(outputs[one.request_id]) == toy_engines.expected_tokens(one)
    assert engine.metrics().by_method().keys() == {"draft_model", "ngram"}


class Counting(NgramProposer):
    """Counts what it has proposed."""

    num_proposed = 0

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        made = super().propose(sequences, num_draft_tokens)
        self.num_proposed += len(made)
        return made


class Pretending(Counting):
    """Says that what it has looked up was drawn from a uniform distribution."""

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        uniform = TokenDistribution(
            np.arange(4, dtype=np.uint32).tobytes(), np.full(4, 0.25, np.float32).tobytes()
        )
        made = super().propose(sequences, num_draft_tokens)
        return {
            name: replace(one, noise_stream="draft", q_rows=(uniform,) * one.num_tokens)
            for name, one in made.items()
        }


def p_value_with(fallback: Counting, rule: str) -> float:
    """Chi-square against p, where about half of the drafts are missing."""
    drafter = toy_engines.Forgetful(drafter_for(rule, TINY_DRAFT))
    found = p_value(rule, FallbackProposer(drafter, fallback))
    assert fallback.num_proposed > 1000, "it hardly ever stood in: this proves nothing"
    return found


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("rule", LOSSLESS)
def test_what_comes_out_is_distributed_as_the_target(rule: str) -> None:
    assert p_value_with(Counting(prompt_lookup_min=1, prompt_lookup_max=3), rule) > 1e-4


@pytest.mark.full
@pytest.mark.slow
def test_control_a_lookup_is_no_sample() -> None:
    assert p_value_with(Pretending(prompt_lookup_min=1, prompt_lookup_max=3), "rejection") < 1e-8
