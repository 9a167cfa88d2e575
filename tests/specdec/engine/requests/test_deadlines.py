"""Requests that may last only so long: they end at that time wherever they are, and cost nothing after it."""

from __future__ import annotations

import math

import msgspec
import pytest

from specdec.core.clock import ManualClock
from specdec.core.errors import InputError
from specdec.core.outputs import RequestOutput
from specdec.core.request import LatencyTarget, Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.engine.requests.deadlines import Deadlines
from tests.specdec.engine.toy_engines import OracleProposer, expected_tokens, request, toy_engine

LONG = SamplingParams(temperature=0.0, max_tokens=500)


def timed(name: str, timeout_s: float | None, params: SamplingParams = LONG, prompt_len: int = 3) -> Request:
    one = request(name, [number % 7 for number in range(prompt_len)], params)
    return msgspec.structs.replace(one, timeout_s=timeout_s)


class Rounds:
    """An engine whose rounds take a second each."""

    def __init__(self, **options: int) -> None:
        self.clock = ManualClock()
        self.proposer = OracleProposer()
        self.engine: Engine = toy_engine(
            self.proposer,
            clock=self.clock,
            num_draft_tokens=1,
            **options,  # type: ignore[arg-type]
        )
        self.outputs: dict[str, list[RequestOutput]] = {}

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self.clock.advance(1.0)
            for output in self.engine.step():
                self.outputs.setdefault(output.request_id, []).append(output)
            self.engine.check_integrity()

    def last(self, name: str) -> RequestOutput:
        return self.outputs[name][-1]


def test_a_request_that_runs_ends_with_what_it_has() -> None:
    rounds = Rounds()
    one = timed("a", 4.5)
    rounds.engine.add_request(one)
    rounds.engine.add_request(timed("b", None))
    rounds.run(4)
    assert rounds.last("a").finish_reason is None
    rounds.run(1)
    last = rounds.last("a")
    assert (last.finish_reason, last.error_code) == ("error", "request_timeout")
    assert last.error == "the request's time was up: 7 tokens had been generated"
    assert [token for output in rounds.outputs["a"] for token in output.token_ids] == expected_tokens(one)[:7]
    assert rounds.proposer.released == ["a"]
    assert rounds.engine.metrics().num_timeouts == 1
    assert rounds.engine.metrics().snapshot()["request_timeouts"] == 1
    assert rounds.last("b").finish_reason is None, "others go on"


def test_a_request_that_waits_ends_without_having_run() -> None:
    rounds = Rounds(max_num_seqs=1)
    rounds.engine.add_request(timed("runs", None))
    rounds.engine.add_request(timed("waits", 2))
    rounds.run(2)
    assert rounds.last("waits").error == "the request's time was up: it waited in the queue"
    assert rounds.engine.metrics().num_waiting == 0


def test_a_long_prompt_is_not_read_to_its_end() -> None:
    rounds = Rounds(max_num_batched_tokens=8)
    rounds.engine.add_request(timed("a", 3, prompt_len=100))
    rounds.run(3)
    assert rounds.last("a").error == "the request's time was up: its prompt was being read"
    assert not rounds.engine.has_work
    assert rounds.engine.metrics().kv_cache_usage == 0.0


def test_who_ends_in_time_is_not_ended_again() -> None:
    rounds = Rounds()
    rounds.engine.add_request(timed("a", 10, SamplingParams(temperature=0.0, max_tokens=4)))
    rounds.engine.add_request(timed("b", 10))
    rounds.run(3)
    rounds.engine.abort(rounds.last("b").request_id)
    rounds.run(1)
    rounds.engine.add_request(timed("b", None))  # the same id again: another request
    rounds.run(20)
    assert rounds.last("a").finish_reason == "length"
    assert rounds.last("b").finish_reason is None
    assert rounds.engine.metrics().num_timeouts == 0


def test_a_newer_epoch_has_its_own_time() -> None:
    rounds = Rounds()
    rounds.engine.add_request(timed("a", 3))
    rounds.run(2)
    rounds.engine.add_request(msgspec.structs.replace(timed("a", 6), epoch=1))
    rounds.run(5)
    assert rounds.last("a").finish_reason is None
    rounds.run(1)
    assert (rounds.last("a").epoch, rounds.last("a").error_code) == (1, "request_timeout")


def test_no_time_left_is_an_end_and_not_a_refusal() -> None:
    """A replay that comes too late."""
    rounds = Rounds()
    rest = timed("a", 3).continued(delivered_token_ids=(1,), elapsed_s=5.0)
    assert rest.timeout_s == 0.0
    rounds.engine.add_request(rest)
    rounds.run(1)
    assert rounds.last("a").error_code == "request_timeout"
    assert rounds.engine.metrics().num_rounds == 0


def test_who_has_waited_has_so_much_less_time_for_a_first_token() -> None:
    """It was without a group, say, that its client has waited for all the same."""
    asked = msgspec.structs.replace(timed("a", 60), slo=LatencyTarget(ttft_ms=2000.0, itl_ms=50.0))
    rest = asked.continued(delivered_token_ids=(), elapsed_s=0.5)
    assert rest.slo == LatencyTarget(ttft_ms=1500.0, itl_ms=50.0)
    over = asked.continued(delivered_token_ids=(), elapsed_s=50.0).slo
    assert over is not None
    assert over.ttft_ms is not None
    assert 0.0 < over.ttft_ms <= 1.0
    begun = asked.continued(delivered_token_ids=(1,), elapsed_s=50.0)
    assert begun.slo == asked.slo, "its first token has come"


@pytest.mark.parametrize("timeout_s", [-1.0, math.inf, math.nan])
def test_times_that_are_none_are_refused(timeout_s: float) -> None:
    with pytest.raises(InputError, match="timeout_s must be") as refusal:
        Rounds().engine.add_request(timed("a", timeout_s))
    assert refusal.value.param == "timeout_s"


@pytest.mark.parametrize("priority", [-1001, 1001])
def test_priorities_have_limits(priority: int) -> None:
    with pytest.raises(InputError, match="priority must be between -1000 and 1000") as refusal:
        Rounds().engine.add_request(request("a", priority=priority))
    assert refusal.value.param == "priority"


def test_ended_requests_are_not_kept_until_their_time() -> None:
    rounds = Rounds()
    for number in range(1000):
        rounds.engine.add_request(timed(f"r{number}", 1e6, SamplingParams(temperature=0.0, max_tokens=1)))
        rounds.run(1)
    deadlines = rounds.engine._deadlines
    assert isinstance(deadlines, Deadlines)
    assert len(deadlines) <= 64
