"""The bookkeeping of the measurement of online learning."""

from __future__ import annotations

import pytest

from benchmarks.online_learning import Plan, excerpts, headlines


def test_no_two_prompts_overlap() -> None:
    plan = Plan(num_batches=3, batch=4, prompt_tokens=5)
    batches = excerpts([range(52), range(100, 140)], plan)
    assert [len(batch) for batch in batches] == [4, 4, 4]
    tokens = [token for batch in batches for prompt in batch for token in prompt]
    assert len(tokens) == len(set(tokens)) == 60
    with pytest.raises(AssertionError, match="18 excerpts, not 20"):
        excerpts([range(52), range(100, 140)], Plan(num_batches=5, batch=4, prompt_tokens=5))


def test_headlines_are_of_the_first_and_the_last_batches() -> None:
    fixed = [{"acceptance": 0.4, "tokens_per_pass": 2.0}] * 8
    learning = [{"acceptance": value / 10, "tokens_per_pass": 1.0 + value} for value in range(8)]
    numbers = headlines(
        {"fixed": fixed, "learning": learning, "exchange": {"staging_s": 0.002, "taking_s": 0.0001}}
    )
    assert numbers["acceptance_fixed_last_quarter"] == pytest.approx(0.4)
    assert numbers["acceptance_learning_first_quarter"] == pytest.approx(0.05)
    assert numbers["acceptance_learning_last_quarter"] == pytest.approx(0.65)
    assert numbers["staging_ms"] == pytest.approx(2.0)
