"""Rates of service: the drain rate is measured while others wait, and idle times count for nothing."""

from __future__ import annotations

import pytest

from specdec.core.ids import Epoch, RequestId
from specdec.core.outputs import RequestOutput, RequestStats
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.scheduling.service_rates import ServiceRates


def finished(
    began_s: float,
    first_s: float,
    ended_s: float,
    num_tokens: int = 11,
) -> RequestOutput:
    return RequestOutput(
        request_id=RequestId("r"),
        epoch=Epoch(0),
        first_index=0,
        token_ids=(),
        text="",
        finish_reason="length",
        num_prompt_tokens=100,
        num_generated_tokens=num_tokens,
        stats=RequestStats(
            arrival_s=0.0,
            first_scheduled_s=began_s,
            first_token_s=first_s,
            finished_s=ended_s,
        ),
    )


def decoded(num_tokens: int, first_index: int = 1) -> RequestOutput:
    return RequestOutput(
        request_id=RequestId("r"),
        epoch=Epoch(0),
        first_index=first_index,
        token_ids=(1,) * num_tokens,
        text="",
    )


def note(
    rates: ServiceRates,
    outputs: list[RequestOutput],
    now_s: float,
    *,
    num_decoding: int = 0,
    is_saturated: bool = False,
) -> None:
    rates.note_round(outputs, now_s, num_decoding=num_decoding, is_saturated=is_saturated)


def request(max_tokens: int | None, *, ignore_eos: bool = False) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Request(request_id=RequestId("r"), prompt_token_ids=(1,) * 200, params=params, seed=0)


def test_nothing_is_known_at_first() -> None:
    rates = ServiceRates(4, 0.0)
    expected = rates.expect(request(100), 1000)
    assert (expected.wait_s, expected.first_token_s, expected.end_s) == (0.0, 0.0, 0.0)


def test_without_a_queue_ever_a_place_is_free_as_often_as_requests_would_end() -> None:
    rates = ServiceRates(4, 0.0)
    for number in range(20):  # one at a time, every ten seconds
        note(
            rates,
            [finished(10.0 * number, 10.0 * number, 10.0 * number + 2.0)],
            10.0 * number,
            is_saturated=False,
        )
    assert rates.seconds_per_request == pytest.approx(0.5)


def test_while_others_wait_it_is_what_was_seen() -> None:
    rates, now_s = ServiceRates(4, 0.0), 0.0
    for _ in range(40):
        now_s += 0.3
        note(rates, [finished(now_s - 2.0, now_s - 1.0, now_s)], now_s, is_saturated=True)
    now_s += 1000.0  # nobody waits, nothing happens
    note(rates, [], now_s - 1000.0, is_saturated=False)
    note(rates, [], now_s, is_saturated=True)
    for _ in range(3):
        now_s += 0.3
        note(rates, [finished(now_s - 2.0, now_s - 1.0, now_s)], now_s, is_saturated=True)
    assert rates.seconds_per_request == pytest.approx(0.3, rel=0.01)


def test_what_a_request_would_experience() -> None:
    rates = ServiceRates(1, 0.0)
    for _ in range(10):
        note(rates, [finished(0.0, 1.0, 3.0)], 3.0, is_saturated=False)
    expected = rates.expect(request(6, ignore_eos=True), 2)
    assert expected.wait_s == pytest.approx(6.0)
    assert expected.first_token_s == pytest.approx(6.0 + 2.0)  # twice the prompt
    assert expected.end_s == pytest.approx(8.0 + 5 * 0.2)
    assert rates.expected_tokens(request(1000)) == rates.expected_tokens(request(None)) == 11
    assert rates.expect(request(1000), -3).wait_s == 0.0


def test_who_began_together_ends_together() -> None:
    rates = ServiceRates(3, 0.0)
    for _ in range(10):
        note(rates, [finished(0.0, 1.0, 3.0)], 3.0, is_saturated=False)  # 0.2 s per token, 3 s in all
    assert rates.wait_s(0, [9, 10, 11]) == 0.0
    waits = [rates.wait_s(number, [10, 2, 11]) for number in range(1, 6)]
    assert waits == pytest.approx([0.4, 2.0, 2.2, 0.4 + 3.0, 2.0 + 3.0])
    assert rates.wait_s(4) == pytest.approx(4 * 1.0)  # nothing is known of who runs: at the drain rate


def measured() -> ServiceRates:
    """After requests of 1 s to the first of 11 tokens, and 0.2 s for each that follows."""
    rates = ServiceRates(2, 0.0)
    for _ in range(10):
        note(rates, [finished(0.0, 1.0, 3.0)], 3.0)
    return rates


@pytest.mark.parametrize(("round_s", "slowness"), [(0.1, 1.0), (0.2, 2.0), (0.05, 0.5), (60.0, 3.0)])
def test_what_tokens_take_now_counts(round_s: float, slowness: float) -> None:
    rates = measured()
    note(rates, [], 3.0, num_decoding=2)
    for number in range(1, 200):  # in turn, a token for each in two rounds
        note(rates, [] if number % 2 else [decoded(2)], 3.0 + round_s * number, num_decoding=2)
    assert rates.wait_s(1, [10]) == pytest.approx(slowness * 2.0)
    assert rates.wait_s(2, [10]) == pytest.approx(slowness * (2.0 + 3.0))
    expected = rates.expect(request(6, ignore_eos=True), 1, [10])
    assert expected.first_token_s == pytest.approx(slowness * (2.0 + 2.0))
    assert expected.end_s == pytest.approx(slowness * (4.0 + 5 * 0.2))


def test_prompts_and_idle_times_are_no_pace() -> None:
    rates = measured()
    for number in range(1, 50):  # prompts are read for long, and bring first tokens
        note(rates, [decoded(1, first_index=0)] * 4, 3.0 + 9.0 * number)
    assert rates.wait_s(1, [10]) == pytest.approx(2.0)
    note(rates, [], 500.0, num_decoding=1)
    note(rates, [decoded(5)], 510.0)  # too few to tell
    assert rates.wait_s(1, [10]) == pytest.approx(2.0)


def margin_after(waits: list[tuple[float, float]]) -> float:
    """Of (expected, actual) seconds to the first token."""
    rates = ServiceRates(1, 0.0)
    for expected_s, actual_s in waits:
        rates.note_first_token(expected_s, actual_s)
    return rates.expect(request(6), 2).margin


def test_the_margin_is_how_badly_first_tokens_are_foreseen() -> None:
    least = margin_after([])
    assert least == pytest.approx(1.2)
    assert margin_after([(1.0, 1.9)] * 5) == least  # too few to know
    assert margin_after([(2.0, 2.0)] * 100) == least
    assert margin_after([(2.0, 2.8)] * 100) == pytest.approx(1.4)
    assert margin_after([(2.0, 1.6), (2.0, 2.4)] * 100) == pytest.approx(1.5, abs=0.01)  # 1 and 2.5 times 0.2
    assert margin_after([(2.0, 1.0)] * 100) == least


def test_one_wait_that_nobody_could_foresee_does_not_shut_the_door() -> None:
    usual = [(2.0, 2.0)] * 100
    assert margin_after([*usual, (2.0, 600.0)]) < 1.6
    assert margin_after([(2.0, 600.0)] * 100) == pytest.approx(2.0)
    assert margin_after([*usual, (0.01, 0.09)]) == pytest.approx(1.2)  # a short one says little
