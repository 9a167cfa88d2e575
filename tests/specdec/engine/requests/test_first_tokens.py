"""Requests that want their first token soon: drafts of others do not make it later."""

from __future__ import annotations

import msgspec
import pytest

from specdec.core.clock import ManualClock
from specdec.core.request import LatencyTarget
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.targets.toy_target import ToyTarget, ToyTokenizer
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.speculation.controller import FixedController
from tests.specdec.engine.toy_engines import MODEL, VOCAB_SIZE, OracleProposer, expected_tokens, request


class Minding(FixedController):
    """Drafts are bounded by latency targets."""

    minds_targets = True


@pytest.mark.parametrize(
    ("ttft_ms", "minds", "drafts_beside"),
    [
        (3000.0, True, False),  # more than half of it is over
        (60000.0, True, True),  # there is time
        (1500.0, True, True),  # it is too late
        (None, True, True),
        (3000.0, False, True),
    ],
)
def test_rounds_that_read_its_prompt_have_no_drafts_once_half_of_the_time_is_over(
    ttft_ms: float | None, minds: bool, drafts_beside: bool
) -> None:
    """Sixteen rows: the second round reads the last five of its prompt, and has rows for drafts."""
    clock = ManualClock()
    engine = Engine.from_parts(
        target=ToyTarget(MODEL),
        proposer=OracleProposer(),
        tokenizer=ToyTokenizer.of_letters(VOCAB_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        controller=(Minding if minds else FixedController)(3),
        clock=clock,
    )
    params = SamplingParams(temperature=0.0, max_tokens=40)
    other = request("other", [1, 2], params)
    soon = request("soon", [number % 7 for number in range(20)], params)
    if ttft_ms is not None:
        soon = msgspec.structs.replace(soon, slo=LatencyTarget(ttft_ms=ttft_ms))
    engine.add_request(other)
    engine.step()
    engine.add_request(soon)
    tokens: dict[str, list[int]] = {"other": [], "soon": []}
    num_drafted = []
    while engine.has_work:
        clock.advance(1.0)
        before = engine.metrics().num_draft_tokens
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
        num_drafted.append(engine.metrics().num_draft_tokens - before)
    assert (num_drafted[1] > 0) == drafts_beside
    assert num_drafted[2] > 0, "its first token is there"
    assert tokens["soon"] == expected_tokens(soon)
