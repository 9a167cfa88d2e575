"""The measurement's bookkeeping; times themselves are not asserted."""

from __future__ import annotations

import random

import pytest

from deploy.bench_offline import Workload, ends_in_loop
from specdec.core.sampling_params import SamplingParams


@pytest.mark.parametrize("period", [1, 2, 7, 32])
def test_a_repeating_tail_is_a_loop(period: int) -> None:
    generator = random.Random(period)
    unit = [generator.randrange(1000) for _ in range(period)]
    assert ends_in_loop([*range(50), *(unit * 64)[:64]])


def test_other_tails_are_none() -> None:
    generator = random.Random(0)
    tokens = [generator.randrange(1000) for _ in range(200)]
    assert not ends_in_loop(tokens)
    assert not ends_in_loop([1] * 63)
    assert not ends_in_loop([*[1] * 63, 2])
    unit = [generator.randrange(1000) for _ in range(33)]
    assert not ends_in_loop(unit * 4)


def test_requests_of_a_workload() -> None:
    workload = Workload(
        prompts=[(1, 2), (3,)], batch_size=5, params=SamplingParams(), seed=7, num_draft_tokens=0
    )
    requests = workload.requests("a")
    assert [request.prompt_token_ids for request in requests] == [(1, 2), (3,), (1, 2), (3,), (1, 2)]
    assert len({request.seed for request in requests}) == 5
    assert {request.num_draft_tokens for request in requests} == {0}
    assert [request.seed for request in requests] == [request.seed for request in workload.requests("b")]
    assert not {request.request_id for request in requests} & {
        request.request_id for request in workload.requests("b")
    }
