"""Rounds in flight: two cohorts that alternate, and what may happen to requests meanwhile."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from specdec.core.ids import Epoch, RequestId
from specdec.core.plan import TargetResult, TargetStep
from specdec.core.proposal import AheadOutcome, Proposal
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.core.sequence import SequenceView
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyTarget, ToyTokenizer
from specdec.proposers.base import AheadWish, ProposerCapabilities
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from specdec.scheduling.speculation.modes import OverlapMode
from tests.specdec.engine.toy_engines import (
    GREEDY,
    MODEL,
    SAMPLED,
    VOCAB_SIZE,
    OracleProposer,
    expected_tokens,
    request,
    run,
    tokens_of,
)


class _FarOracle(OracleProposer):
    """Stands for drafters elsewhere; notes for whom drafts are waited for, and what the target has then."""

    capabilities = ProposerCapabilities(name="oracle", remote=True)

    def __init__(self, target: _WatchedTarget) -> None:
        super().__init__(wrong_from=2)
        self.target = target
        self.seen: list[tuple[set[RequestId], set[RequestId]]] = []
        """By round: who is drafted for, who is being verified."""

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        self.seen.append(({one.request_id for one in sequences}, self.target.in_flight))
        return super().propose(sequences, num_draft_tokens)


class _WatchedTarget(ToyTarget):
    """Knows which sequences are in its queue."""

    def __init__(self) -> None:
        super().__init__(MODEL)
        self.queue: list[TargetStep] = []
        self.deepest = 0

    @property
    def in_flight(self) -> set[RequestId]:
        return {work.request_id for step in self.queue for work in step.works}

    def submit(self, step: TargetStep) -> None:
        twice = self.in_flight & {work.request_id for work in step.works}
        assert twice <= set(step.released), "a request is in two rounds"  # an older epoch's may be on its way
        self.queue.append(step)
        self.deepest = max(self.deepest, len(self.queue))
        super().submit(step)

    def collect(self) -> TargetResult:
        self.queue.pop(0)
        return super().collect()


class _AheadOracle(_FarOracle):
    """Notes what is prepared while the target verifies, too; drafts when asked all the same."""

    capabilities = ProposerCapabilities(name="oracle", remote=True, looks_ahead=True)
    ready_s: float | None = 0.0

    def __init__(self, target: _WatchedTarget) -> None:
        super().__init__(target)
        self.prepared: list[dict[RequestId, int]] = []
        self.drafted: list[dict[RequestId, int]] = []

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        self.drafted.append(dict(num_draft_tokens))
        return super().propose(sequences, num_draft_tokens)

    def look_ahead(self, wishes: Sequence[AheadWish]) -> None:
        assert all(sum(one.fan_out or ()) > 0 for one in wishes)
        self.prepared.append({one.view.request_id: one.num_draft_tokens for one in wishes})

    def take_ahead_outcomes(self) -> Sequence[AheadOutcome]:
        return ()

    def take_drafting_s(self) -> float:
        return 0.0


def _engine(
    mode: OverlapMode = "ping_pong", *, max_num_seqs: int = 8, kind: type[_FarOracle] = _FarOracle
) -> tuple[Engine, _FarOracle]:
    target = _WatchedTarget()
    proposer = kind(target)
    engine = Engine.from_parts(
        target=target,
        proposer=proposer,
        tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
        controller=FixedController(4, mode=mode),
    )
    return engine, proposer


def _requests(count: int, params: SamplingParams = GREEDY) -> list[Request]:
    return [request(f"r{index}", (1, 2, index), params, seed=index) for index in range(count)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_two_cohorts_write_what_the_model_writes(count: int, params: SamplingParams) -> None:
    engine, _ = _engine()
    requests = _requests(count, params)
    outputs = run(engine, *requests)
    for one in requests:
        assert tokens_of(outputs[one.request_id]) == expected_tokens(one)


def test_one_cohort_is_drafted_for_while_the_other_is_verified() -> None:
    engine, proposer = _engine()
    run(engine, *_requests(6))
    overlapped = [(drafted, verified) for drafted, verified in proposer.seen if verified]
    assert len(overlapped) > len(proposer.seen) / 2
    assert all(not drafted & verified for drafted, verified in overlapped)
    assert proposer.target.deepest == 2


@pytest.mark.parametrize("mode", ["lockstep", "draft_ahead"])
def test_without_cohorts_nothing_is_in_flight_while_drafts_are_awaited(mode: OverlapMode) -> None:
    engine, proposer = _engine(mode)  # this proposer cannot look ahead
    run(engine, *_requests(6))
    assert all(not verified for _, verified in proposer.seen)
    assert proposer.target.deepest == 1


def test_who_comes_while_others_are_drafted_ahead_for_is_not_waited_for() -> None:
    """What it will need is prepared while its prompt is read: asked for behind it, it would hold up all."""
    engine, proposer = _engine("draft_ahead", kind=_AheadOracle)
    assert isinstance(proposer, _AheadOracle)
    (first,) = _requests(1)
    engine.add_request(first)
    for _ in range(3):
        engine.step()
    silent = request("silent", (4, 5, 6), GREEDY, num_draft_tokens=0)
    few = request("few", (4, 5, 7), GREEDY, num_draft_tokens=2)
    late = request("late", (4, 5, 8), GREEDY)
    outputs = run(engine, silent, few, late)
    for one in (silent, few, late):
        assert tokens_of(outputs[one.request_id]) == expected_tokens(one)
    for one, budget in ((few, 2), (late, 4)):
        begins = next(at for at, budgets in enumerate(proposer.drafted) if one.request_id in budgets)
        assert begins > 3
        assert proposer.prepared[begins - 1][one.request_id] == budget
    assert not any(silent.request_id in prepared for prepared in proposer.prepared)


@pytest.mark.parametrize("has_others", [False, True])
def test_who_asks_for_more_than_there_may_be_has_no_more_prepared(has_others: bool) -> None:
    engine, proposer = _engine("draft_ahead", kind=_AheadOracle)
    assert isinstance(proposer, _AheadOracle)
    if has_others:
        engine.add_request(*_requests(1))
        for _ in range(3):
            engine.step()
    many = request("many", (4, 5, 9), GREEDY, num_draft_tokens=64)
    outputs = run(engine, many)
    assert tokens_of(outputs[many.request_id]) == expected_tokens(many)
    prepared = [its[many.request_id] for its in proposer.prepared if many.request_id in its]
    assert max(prepared) == 4, "what is configured"


def test_a_lone_request_goes_on_in_lockstep() -> None:
    engine, proposer = _engine()
    run(engine, *_requests(1))
    assert all(not verified for _, verified in proposer.seen)


def test_cohorts_are_evened_out_as_requests_come_and_go() -> None:
    engine, proposer = _engine(max_num_seqs=12)
    late = [request(f"late{index}", (3, index), GREEDY) for index in range(6)]
    for one in _requests(4):
        engine.add_request(one)
    for _ in range(3):
        engine.step()
    for one in late:
        engine.add_request(one)
    for _ in range(4):
        engine.step()
    drafted, verified = proposer.seen[-1]
    assert abs(len(drafted) - len(verified)) <= 1
    assert len(drafted | verified) > 6


def test_a_drafter_in_this_process_is_never_overlapped() -> None:
    target = _WatchedTarget()
    engine = Engine.from_parts(
        target=target,
        proposer=OracleProposer(),
        tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE),
        controller=FixedController(4, mode="ping_pong"),
    )
    run(engine, *_requests(4))
    assert target.deepest == 1


def test_a_request_ended_in_flight_gets_one_last_output_and_its_round_nothing() -> None:
    engine, proposer = _engine()
    requests = _requests(4)
    for one in requests:
        engine.add_request(one)
    engine.step()
    engine.step()
    flying = next(iter(proposer.target.in_flight))
    engine.abort(flying)
    engine.check_integrity()
    after = [output for _ in range(30) for output in engine.step() if output.request_id == flying]
    assert [output.finish_reason for output in after] == ["abort"]
    assert not engine.has_work
    assert not proposer.target.queue
    engine.check_integrity()


def test_a_newer_epoch_is_not_touched_by_the_flight_of_the_older_one() -> None:
    engine, proposer = _engine()
    requests = _requests(4, SAMPLED)
    streams: dict[str, list[int]] = {one.request_id: [] for one in requests}
    for one in requests:
        engine.add_request(one)
    for _ in range(3):
        for output in engine.step():
            streams[output.request_id].extend(output.token_ids)
    old = next(one for one in requests if one.request_id in proposer.target.in_flight)
    delivered = streams[old.request_id]
    engine.add_request(
        request(old.request_id, old.prompt_token_ids, SAMPLED, seed=old.seed, epoch=1, delivered=delivered)
    )
    while engine.has_work:
        for output in engine.step():
            if output.request_id != old.request_id or output.epoch == Epoch(1):
                assert output.first_index == len(streams[output.request_id])
                streams[output.request_id].extend(output.token_ids)
        engine.check_integrity()
    for one in requests:
        assert streams[one.request_id] == expected_tokens(one)


def test_when_everybody_has_left_the_last_flight_still_lands() -> None:
    engine, proposer = _engine()
    for one in _requests(4):
        engine.add_request(one)
    engine.step()
    for one in _requests(4):
        engine.abort(one.request_id)
    while engine.has_work:
        engine.step()
    assert not proposer.target.queue


def test_a_lost_target_ends_every_request_once() -> None:
    target = _WatchedTarget()
    target.num_steps_until_lost = 4
    proposer = _FarOracle(target)
    engine = Engine.from_parts(
        target=target,
        proposer=proposer,
        tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE),
        controller=FixedController(2, mode="ping_pong"),
    )
    outputs = run(engine, *_requests(5))
    for its in outputs.values():
        assert [output.error_code for output in its if output.finish_reason] == ["target_lost"]


def test_random_comings_and_goings() -> None:
    """Aborts, arrivals and little memory: who is not aborted gets its tokens."""
    for seed in range(30):
        rng = random.Random(seed)
        target = _WatchedTarget()
        proposer = _FarOracle(target)
        modes: list[OverlapMode] = ["ping_pong", "lockstep"]
        controller = FixedController(rng.randint(0, 4), mode="ping_pong")
        engine = Engine.from_parts(
            target=target,
            proposer=proposer,
            tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE),
            scheduler=SchedulerConfig(max_num_seqs=rng.randint(1, 6), max_num_batched_tokens=16),
            controller=controller,
        )
        waiting = _requests(9, rng.choice([GREEDY, SAMPLED]))
        tokens: dict[str, list[int]] = {one.request_id: [] for one in waiting}
        everyone, aborted = list(waiting), set()
        while waiting or engine.has_work:
            if waiting and rng.random() < 0.4:
                engine.add_request(waiting.pop())
            if rng.random() < 0.05 and target.in_flight:
                gone = rng.choice(sorted(target.in_flight))
                engine.abort(gone)
                aborted.add(gone)
            if rng.random() < 0.1:
                controller._mode = rng.choice(modes)
            for output in engine.step():
                tokens[output.request_id].extend(output.token_ids)
            engine.check_integrity()
        for one in everyone:
            if one.request_id not in aborted:
                assert tokens[one.request_id] == expected_tokens(one), seed
