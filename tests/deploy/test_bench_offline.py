"""The measurement's bookkeeping; times themselves are not asserted."""

from __future__ import annotations

from deploy.bench_offline import Workload
from specdec.core.sampling_params import SamplingParams


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
