"""Which requests may enter, and what the others are told."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.core.errors import CapacityError, InputError, LateError
from specdec.core.ids import RequestId
from specdec.core.request import LatencyTarget, Request
from specdec.core.sampling_params import SamplingParams
from specdec.kv.selection import KvBudgets, KvSelectionConfig
from specdec.scheduling.admission import (
    AdmissionLimits,
    check_in_time,
    check_queue,
    check_request,
    without_misfits,
)
from specdec.scheduling.config import SchedulerConfig
from specdec.scheduling.service_rates import Expectation
from specdec.scheduling.speculation.drafter_shares import DrafterSet


def request(length: int = 4, **changes: object) -> Request:
    fields: dict[str, object] = {
        "request_id": RequestId("r"),
        "prompt_token_ids": (1,) * length,
        "params": SamplingParams(),
        "seed": 0,
    }
    return Request(**(fields | changes))  # type: ignore[arg-type]


def limits(**changes: Any) -> AdmissionLimits:
    fields: dict[str, Any] = {"vocab_size": 10, "max_model_len": 16, "pool_tokens": 64, "max_num_waiting": 8}
    return AdmissionLimits(**(fields | changes))


def test_longest_prompt_leaves_room_for_one_token() -> None:
    check_request(request(15), limits())
    with pytest.raises(InputError, match="16 tokens, at most 15 fit: the model's context") as caught:
        check_request(request(16), limits())
    assert caught.value.param == "prompt"


def test_prompt_longer_than_the_pool() -> None:
    with pytest.raises(InputError, match="KV cache holds 12 tokens"):
        check_request(request(12), limits(pool_tokens=12))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_token_ids": ()}, "prompt"),
        ({"prompt_token_ids": (1, 10)}, "prompt"),
        ({"prompt_token_ids": (-1,)}, "prompt"),
        ({"delivered_token_ids": (11,)}, "delivered_token_ids"),
        ({"prompt_token_ids": (1, 2.0)}, "prompt"),
        ({"prompt_token_ids": ("1",)}, "prompt"),
        ({"delivered_token_ids": (None,)}, "delivered_token_ids"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"num_draft_tokens": -1}, "num_draft_tokens"),
        ({"slo": LatencyTarget(itl_ms=0.0)}, "slo"),
        ({"slo": LatencyTarget(ttft_ms=float("nan"))}, "slo"),
        ({"num_draft_tokens": 65}, "num_draft_tokens"),
        ({"params": SamplingParams(temperature=-1.0)}, "temperature"),
        ({"params": SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"params": SamplingParams(stop="END")}, "stop"),  # type: ignore[arg-type]
        ({"params": SamplingParams(stop=("a", b"b"))}, "stop"),  # type: ignore[arg-type]
        ({"params": SamplingParams(stop=("",))}, "stop"),
        ({"params": SamplingParams(stop_token_ids=5)}, "stop_token_ids"),  # type: ignore[arg-type]
        ({"params": SamplingParams(stop_token_ids=(-1,))}, "stop_token_ids"),
        ({"params": SamplingParams(ignore_eos="no")}, "ignore_eos"),  # type: ignore[arg-type]
        ({"params": SamplingParams(logprobs_mode="all")}, "logprobs_mode"),  # type: ignore[arg-type]
    ],
)
def test_wrong_fields_are_named(changes: dict[str, object], param: str) -> None:
    with pytest.raises(InputError) as caught:
        check_request(request(**changes), limits())
    assert caught.value.param == param


def test_full_queue_says_when_to_come_back() -> None:
    check_queue(8, limits(), 0.5)
    with pytest.raises(CapacityError) as caught:
        check_queue(9, limits(), 0.5)
    assert 1.0 <= caught.value.retry_after_s <= 60.0


@pytest.mark.parametrize("num_waiting", [9, 50, 500])
def test_a_full_queue_is_full_for_a_fiftieth_of_the_wait(num_waiting: int) -> None:
    with pytest.raises(CapacityError) as caught:
        check_queue(num_waiting, limits(), 0.5)
    assert caught.value.holds_s == pytest.approx(0.5 * num_waiting / 50)
    with pytest.raises(CapacityError) as caught:
        check_queue(num_waiting, limits(), 0.0)
    assert caught.value.holds_s == 0.0, "nobody knows"


@pytest.mark.parametrize("ttft_ms", [7190.0, 1000.0])
def test_who_would_be_late_would_be_for_a_fiftieth_of_the_wait(ttft_ms: float) -> None:
    expected = Expectation(wait_s=5.0, first_token_s=6.0, end_s=8.0, margin=1.2)
    with pytest.raises(LateError) as caught:
        check_in_time(request(slo=LatencyTarget(ttft_ms=ttft_ms)), expected)
    assert caught.value.holds_s == pytest.approx(0.1)


def test_retry_time_is_bounded() -> None:
    for seconds_per_request in (0.0, 1e6):
        with pytest.raises(CapacityError) as caught:
            check_queue(9, limits(), seconds_per_request)
        assert 1.0 <= caught.value.retry_after_s <= 60.0


@pytest.mark.parametrize("k", [0, 4, 5, 64])
def test_a_draft_that_will_be_cut_is_not_refused_for_its_length(k: int) -> None:
    """Nobody's drafts are longer than configured, and the configured budget holds those."""
    budgets = KvBudgets(KvSelectionConfig(policy="streaming", budget=8), 4)
    its_limits = limits(kv_budgets=budgets)
    check_request(request(num_draft_tokens=k), its_limits)
    check_request(request(num_draft_tokens=k, kv_budget=8), its_limits)
    shorter = request(num_draft_tokens=k, kv_budget=7)
    if k < 4:
        check_request(shorter, its_limits)
        return
    with pytest.raises(
        InputError, match=r"kv_budget: 7 tokens do not hold .* \(4\): give at least 8$"
    ) as caught:
        check_request(shorter, its_limits)
    assert caught.value.param == "speculation.kv_budget"


def test_of_several_drafters_only_the_one_with_the_budget_may_be_asked_for_with_another() -> None:
    budgets = KvBudgets(KvSelectionConfig(policy="streaming", budget=16), 4, drafter="own")
    its_limits = limits(kv_budgets=budgets, drafters=DrafterSet(names=("own", "lookup"), shares=(0.0, 0.0)))
    for wanted in (None, "own"):
        check_request(request(kv_budget=512, drafter=wanted), its_limits)
        with pytest.raises(InputError, match="3 tokens do not hold"):
            check_request(request(kv_budget=3, drafter=wanted), its_limits)
    for budget in (3, 512):
        asking = request(kv_budget=budget, drafter="lookup")
        with pytest.raises(InputError, match=r"kv_budget: .*drafter 'lookup' .* or ask for 'own'") as caught:
            check_request(asking, its_limits)
        assert caught.value.param == "speculation.kv_budget"
        going_on = without_misfits(asking, its_limits)
        assert (going_on.kv_budget, going_on.drafter) == (None, "lookup")
    with pytest.raises(InputError, match=r"speculation\.drafter"):
        check_request(request(kv_budget=512, drafter="nobody"), its_limits)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"timeout_s": 10.0}, None),
        ({"timeout_s": 9.0}, "its end is expected in 8.0 s, .*5.0 s in the queue; its time limit .* is 9 s"),
        ({"slo": LatencyTarget(ttft_ms=8000.0, itl_ms=1.0)}, None),
        (
            {"slo": LatencyTarget(ttft_ms=7000.0)},
            "its first token is expected in 6.0 s, .* slo.ttft_ms gives 7 s",
        ),
        ({}, None),
    ],
)
def test_who_would_be_late_is_refused(changes: dict[str, object], what: str | None) -> None:
    expected = Expectation(wait_s=5.0, first_token_s=6.0, end_s=8.0)
    if what is None:
        check_in_time(request(**changes), expected)  # type: ignore[arg-type]
        return
    with pytest.raises(LateError, match=what) as caught:
        check_in_time(request(**changes), expected)  # type: ignore[arg-type]
    assert 1.0 <= caught.value.retry_after_s <= 60.0


def test_who_need_not_wait_is_let_in_whatever_is_expected() -> None:
    slow = Expectation(wait_s=0.0, first_token_s=60.0, end_s=80.0)
    check_in_time(request(timeout_s=1.0, slo=LatencyTarget(ttft_ms=1.0)), slow)


def test_every_running_sequence_needs_a_row() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        SchedulerConfig(max_num_seqs=65, max_num_batched_tokens=64)


def test_wishes_about_drafting_that_do_not_fit_here_are_left_out() -> None:
    """Of what was taken in elsewhere: they change speed alone, and updates bring other drafters."""
    wanted = request(drafter="old", kv_budget=32, num_draft_tokens=4)
    bare = limits()
    with pytest.raises(InputError):
        check_request(wanted, bare)
    fitting = without_misfits(wanted, bare)
    check_request(fitting, bare)
    assert (fitting.drafter, fitting.kv_budget, fitting.num_draft_tokens) == (None, None, 4)

    small = limits(
        kv_budgets=KvBudgets(KvSelectionConfig(policy="streaming", budget=16), 4),
        drafters=DrafterSet(names=("own", "new"), shares=(0.0, 0.0)),
    )
    for one in (request(kv_budget=5), request(kv_budget=5, num_draft_tokens=13, drafter="old")):
        with pytest.raises(InputError):
            check_request(one, small)
        check_request(without_misfits(one, small), small)
    kept = request(drafter="new", num_draft_tokens=2)
    assert without_misfits(kept, small) == kept
