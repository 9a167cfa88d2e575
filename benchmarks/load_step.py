"""One request, suddenly many, one again: goodput over time."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.core.ids import RequestId
from specdec.core.request import Request
from specdec.core.sampling_params import SamplingParams
from specdec.engine.engine import Engine
from specdec.sampling.noise import choice_seed

Prompts = Sequence[tuple[int, ...]]
_plays = itertools.count()
_GOLDEN = 0.5 * (math.sqrt(5.0) - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """How many requests there always are: who ends is replaced at once."""

    low: int = 1
    high: int = 64
    low_s: float = 4.0
    high_s: float = 8.0
    bin_s: float = 1.0
    prompt_tokens: int = 128
    num_tokens: int = 128
    """In the middle: requests are from half to one and a half times as long (`length_of`). All alike they
    would end at once, and how many of the next prompts are read within the high phase would be chance."""
    acceptance: float = 0.6
    repeats: int = 2
    """Pairs of plain decoding and controller."""

    @property
    def total_s(self) -> float:
        """Low, high, low."""
        return 2.0 * self.low_s + self.high_s

    @property
    def num_bins(self) -> int:
        """Whole bins."""
        return int(self.total_s / self.bin_s)

    def length_of(self, number: int) -> int:
        """Return how many tokens a request generates: evenly spread, neighbours far apart."""
        return round(self.num_tokens * (0.5 + number * _GOLDEN % 1.0))

    def wanted(self, after_s: float) -> int:
        """Return how many requests there are after so many seconds."""
        return self.high if self.low_s <= after_s < self.low_s + self.high_s else self.low


def play(engine: Engine, plan: StepPlan, prompts: Prompts) -> list[float]:
    """Return tokens per second by bin. When the load falls, those that are too many are aborted.

    Every play has the same requests in the same order, and finds nothing of another one's in the cache.
    """
    name, numbers = f"step-{next(_plays)}", itertools.count()
    tokens = [0] * (plan.num_bins + 1)
    running: dict[RequestId, int] = {}
    started_s = time.perf_counter()
    after_s = 0.0
    while after_s < plan.total_s:
        wanted = plan.wanted(after_s)
        while len(running) < wanted:
            request = _request(plan, prompts, name, next(numbers))
            running[request.request_id] = 0
            engine.add_request(request)
        for request_id in list(running)[wanted:]:
            engine.abort(request_id)
        outputs = engine.step()
        after_s = time.perf_counter() - started_s
        at = min(int(after_s / plan.bin_s), plan.num_bins)
        for output in outputs:
            tokens[at] += len(output.token_ids)
            if output.finish_reason is not None:
                running.pop(output.request_id, None)
    for request_id in running:
        engine.abort(request_id)
    while engine.has_work:
        engine.step()
    return [count / plan.bin_s for count in tokens[: plan.num_bins]]


def _request(plan: StepPlan, prompts: Prompts, play_name: str, number: int) -> Request:
    return Request(
        request_id=RequestId(f"{play_name}-{number}"),
        cache_salt=play_name,
        prompt_token_ids=prompts[number % len(prompts)],
        params=SamplingParams(temperature=0.0, max_tokens=plan.length_of(number), ignore_eos=True),
        seed=choice_seed(number, 0),
    )


def summarise(plan: StepPlan, runs: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Compare the controller with plain decoding: by second, and by phase."""
    curves = {
        name: [statistics.median(values) for values in zip(*its, strict=True)] for name, its in runs.items()
    }
    ratios = [
        fast / slow if slow else 1.0 for fast, slow in zip(curves["controller"], curves["plain"], strict=True)
    ]
    first, second = (round(bound / plan.bin_s) for bound in (plan.low_s, plan.low_s + plan.high_s))
    phases = {
        name: sum(curves["controller"][part]) / sum(curves["plain"][part])
        for name, part in (
            ("low", slice(0, first)),
            ("high", slice(first, second)),
            ("low again", slice(second, None)),
        )
    }
    return {
        "plan": plan,
        "tokens_per_s": curves,
        "runs": runs,
        "ratios": ratios,
        "phases": phases,
        "worst_phase": min(phases.values()),
        "worst_bin": min(ratios),
    }
