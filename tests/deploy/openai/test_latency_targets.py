"""`slo.itl_ms` of a body, on its way to the controller: no drafts that make rounds longer than it says."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

import httpx
import pytest

from deploy.openai.app import create_app
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.core.clock import ManualClock
from specdec.core.plan import TargetStep
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyModel, ToyTarget, ToyTokenizer
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController, SpeculationController
from specdec.scheduling.speculation.cost_profile import CostProfile, DraftPoint, VerifyPoint
from specdec.scheduling.speculation.goodput_controller import GoodputController
from specdec.scheduling.speculation.settings import ControllerSettings
from tests.architectures import VOCAB_SIZE, make_tokenizer
from tests.specdec.engine.toy_engines import OracleProposer

MODEL = ToyModel(VOCAB_SIZE, seed=1)
K = 4
CONTEXT = 32


def step_s(num_rows: int) -> float:
    """12 ms for a token, 20 ms for one behind four drafts."""
    return 0.010 + 0.002 * num_rows


PROFILE = CostProfile(
    key="steps that take as long as they have rows",
    verify=tuple(
        VerifyPoint(num_sequences=1, context_tokens=CONTEXT, num_rows=rows, seconds=step_s(rows))
        for rows in (1, 2, 4, 8, 16)
    ),
    draft=tuple(
        DraftPoint(
            num_sequences=1, context_tokens=CONTEXT, num_steps=steps, num_unseen=1, seconds=1e-6 * steps
        )
        for steps in (1, K)
    ),
)


class SlowRows(ToyTarget):
    """Every row of a step takes its time, on a clock that stands still otherwise."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(MODEL)
        self._clock = clock

    def submit(self, step: TargetStep) -> None:
        super().submit(step)
        self._clock.advance(step_s(sum(work.num_rows for work in step.works)))


def goodput() -> SpeculationController:
    return GoodputController(ControllerSettings(max_draft_tokens=K, max_rows=64, max_sequences=4), PROFILE)


def ask(controller: SpeculationController, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    """Return how many tokens were drafted in each round that had drafts, and what the status says then."""
    clock = ManualClock()
    engine = Engine.from_parts(
        target=SlowRows(clock),
        proposer=OracleProposer(MODEL),
        tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        controller=controller,
        clock=clock,
    )
    service = AsyncEngine(engine)
    app = create_app(service, DoorSettings(served_model_name="toy"), HuggingFaceTokenizer(make_tokenizer()))

    async def talk() -> tuple[list[int], dict[str, Any]]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door") as client:
            body = {
                "prompt": [5, 6, 7],
                "max_tokens": 200,
                "temperature": 0,
                "return_metrics": True,
                **fields,
            }
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            status = (await client.get("/v1/status")).json()
        drafted = response.json()["metrics"]["speculative_decoding"]["per_step_drafted"]
        return drafted, status["target_groups"][0]["choice"]

    try:
        return asyncio.run(talk())
    finally:
        service.close()


def test_without_a_target_k_is_what_brings_most() -> None:
    drafted, choice = ask(goodput())
    assert median(drafted) == K
    assert choice["reason"] != "latency_target"
    assert choice["bounded_by"] == "none"


@pytest.mark.parametrize(("itl_ms", "most"), [(19.0, 3), (17.0, 2), (15.0, 1)])
def test_a_target_leaves_the_drafts_that_there_is_time_for(itl_ms: float, most: int) -> None:
    drafted, choice = ask(goodput(), slo={"itl_ms": itl_ms})
    assert max(drafted) == median(drafted) == most
    assert choice["bounded_by"] == "slo"


def test_a_target_that_leaves_no_time_for_drafts_is_the_reason_for_none() -> None:
    drafted, choice = ask(goodput(), slo={"itl_ms": 13.0})
    assert drafted == []
    assert (choice["reason"], choice["bounded_by"]) == ("latency_target", "slo")


@pytest.mark.parametrize("itl_ms", [11.0, 30.0])
def test_a_target_that_nothing_keeps_or_everything_does_bounds_nothing(itl_ms: float) -> None:
    drafted, choice = ask(goodput(), slo={"itl_ms": itl_ms})
    assert median(drafted) == K
    assert choice["bounded_by"] == "none"


def test_a_fixed_k_does_not_look_at_it() -> None:
    drafted, choice = ask(FixedController(K), slo={"itl_ms": 13.0})
    assert max(drafted) == median(drafted) == K
    assert (choice["reason"], choice["bounded_by"]) == ("configured", "none")
