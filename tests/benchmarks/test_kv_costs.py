"""Bare forwards are timed alike, whatever ran before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import kv_costs
from benchmarks.kv_costs import Step, forward_seconds, forwards_in_turn, seconds_in_turn


class Cache:
    """Holds the weights of who ran last; a virtual clock."""

    def __init__(self, last: str) -> None:
        self.now_s = 0.0
        self.spent_s: dict[str, float] = {}
        self._last = last
        self._since_s = 1.0

    def run(self, name: str, warm_s: float) -> None:
        """Take half as long again in the first 4 ms after somebody else's."""
        if name != self._last:
            self._last, self._since_s = name, 0.0
        seconds = warm_s if self._since_s >= 0.004 else 1.5 * warm_s
        self._since_s += seconds
        self.now_s += seconds
        self.spent_s[name] = self.spent_s.get(name, 0.0) + seconds


@pytest.mark.parametrize(("plain_s", "verify_s"), [(0.001, 0.0015), (0.0002, 0.0004), (0.3, 0.4)])
def test_it_does_not_matter_who_ran_last(
    monkeypatch: pytest.MonkeyPatch, plain_s: float, verify_s: float
) -> None:
    for last in ("plain", "verify"):
        cache = Cache(last)
        monkeypatch.setattr(kv_costs, "time", SimpleNamespace(perf_counter=lambda cache=cache: cache.now_s))
        found = seconds_in_turn(
            {
                "plain": lambda cache=cache: cache.run("plain", plain_s),
                "verify": lambda cache=cache: cache.run("verify", verify_s),
            }
        )
        assert found == pytest.approx({"plain": plain_s, "verify": verify_s}), "as they are once warm"
        assert min(cache.spent_s.values()) >= 0.05, "both for long enough"


def test_nothing_is_kept_for_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    grown: list[bool] = []
    seconds_in_turn({"one": lambda: grown.append((2 * weight).requires_grad)})
    assert not any(grown)


def test_a_gpu_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Telling it takes a millisecond here, a forward nine."""
    now_s = [0.0]

    def take(seconds: float) -> float:
        now_s[0] += seconds
        return now_s[0]

    monkeypatch.setattr(kv_costs, "time", SimpleNamespace(perf_counter=lambda: take(0.001)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: take(0.009))
    logits = SimpleNamespace(device=torch.device("cuda"))
    runner: Any = SimpleNamespace(
        block_size=16, pack=lambda slices: slices, forward_packed=lambda inputs: logits
    )
    step = Step(batch=1, rows=1, context=32)
    assert forwards_in_turn({"plain": (runner, step)}) == pytest.approx({"plain": 0.01})
    assert forward_seconds(runner, step, repeats=3) == pytest.approx(0.01)
