"""How much of the drafting is hidden: what goes on while the target has something to verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from specdec.core.clock import ManualClock
from specdec.core.ids import RequestId
from specdec.core.plan import TargetResult, TargetStep
from specdec.core.proposal import AheadOutcome, Proposal
from specdec.core.sequence import SequenceView
from specdec.engine.engine import Engine
from specdec.engine.metrics.engine_metrics import EngineMetrics
from specdec.engine.targets.toy_target import ToyTarget, ToyTokenizer
from specdec.proposers.base import AheadWish, ProposerCapabilities
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from specdec.scheduling.speculation.modes import OverlapMode
from tests.specdec.engine.toy_engines import GREEDY, MODEL, VOCAB_SIZE, OracleProposer, request, run

VERIFY_S = 0.010


class _SlowTarget(ToyTarget):
    """Takes its time, beside whatever else goes on."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(MODEL)
        self._clock = clock
        self._done_s: list[float] = []

    def submit(self, step: TargetStep) -> None:
        before_s = self._done_s[-1] if self._done_s else 0.0
        self._done_s.append(max(before_s, self._clock.now_s()) + VERIFY_S)
        super().submit(step)

    def collect(self) -> TargetResult:
        self._clock.advance(max(0.0, self._done_s.pop(0) - self._clock.now_s()))
        result = super().collect()
        return TargetResult(result.step_id, result.results, VERIFY_S, 0.0, result.kv_generation)


class _FarOracle(OracleProposer):
    """Drafts elsewhere in a fixed time; in draft_ahead from when it is asked, all verdicts foreseen."""

    capabilities = ProposerCapabilities(name="oracle", remote=True, looks_ahead=True)

    def __init__(self, clock: ManualClock, draft_s: float) -> None:
        super().__init__(wrong_from=2)
        self._clock = clock
        self._draft_s = draft_s
        self._asked_s: float | None = None
        self._untold_s = 0.0

    def propose(
        self, sequences: Sequence[SequenceView], num_draft_tokens: Mapping[RequestId, int]
    ) -> dict[RequestId, Proposal]:
        asked_s = self._clock.now_s() if self._asked_s is None else self._asked_s
        self._clock.advance(max(0.0, asked_s + self._draft_s - self._clock.now_s()))
        self._asked_s = None
        self._untold_s = self._draft_s
        return super().propose(sequences, num_draft_tokens)

    def look_ahead(self, wishes: Sequence[AheadWish]) -> None:
        self._asked_s = self._clock.now_s()

    def take_ahead_outcomes(self) -> Sequence[AheadOutcome]:
        return ()

    @property
    def ready_s(self) -> float | None:
        return self._draft_s

    def take_drafting_s(self) -> float:
        untold_s, self._untold_s = self._untold_s, 0.0
        return untold_s


def metrics_of(mode: OverlapMode, draft_s: float) -> EngineMetrics:
    clock = ManualClock()
    engine = Engine.from_parts(
        target=_SlowTarget(clock),
        proposer=_FarOracle(clock, draft_s),
        tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        controller=FixedController(4, mode=mode),
        clock=clock,
    )
    run(engine, *(request(f"r{index}", (1, 2, index), GREEDY, seed=index) for index in range(6)))
    return engine.metrics()


@pytest.mark.parametrize("draft_s", [0.004, 0.015])
def test_lockstep_hides_nothing(draft_s: float) -> None:
    metrics = metrics_of("lockstep", draft_s)
    assert metrics.drafting_s > 0.8 * metrics.num_rounds * draft_s
    assert metrics.hidden_drafting_s == pytest.approx(0.0)
    assert metrics.round_s == pytest.approx(metrics.drafting_s + metrics.num_rounds * VERIFY_S)


@pytest.mark.parametrize("mode", ["ping_pong", "draft_ahead"])
@pytest.mark.parametrize(("draft_s", "hidden_s"), [(0.004, 0.004), (0.015, VERIFY_S)])
def test_overlap_hides_drafting_up_to_the_time_of_verification(
    mode: OverlapMode, draft_s: float, hidden_s: float
) -> None:
    metrics = metrics_of(mode, draft_s)
    per_round_s = metrics.hidden_drafting_s / metrics.num_rounds
    # The first round has nothing before it to hide behind, and in ping_pong a lone request has no other half.
    assert 0.6 * hidden_s < per_round_s <= hidden_s + 1e-9
    assert metrics.rounds_by_mode[mode] > metrics.num_rounds / 2
