"""A cell of `benchmarks.drafters`: lengths are tried, then drafting and plain decoding take turns."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.drafter_families import Family
from benchmarks.drafter_texts import Prompts, mixed
from benchmarks.drafters_plan import Cell, DecodingSpeed, Plan
from benchmarks.drafters_summary import Runs, summarise
from benchmarks.kv_costs import Step, forwards_in_turn
from benchmarks.measured_engine import MeasuredEngine
from benchmarks.steady import Batch, Counted
from benchmarks.stolen import least_stolen
from benchmarks.turns import Turns
from specdec.scheduling.speculation.controller import FixedController


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What trying every draft length has shown."""

    rates: dict[int, float]
    """Tokens per second, by length."""
    speeds: list[DecodingSpeed]
    """Of plain decoding, and of the length at which drafting is fastest."""

    @property
    def best(self) -> int:
        """The length that brings most."""
        return max(self.rates, key=lambda length: self.rates[length])


class Bench:
    """Measures cells of one family on one target."""

    def __init__(
        self, plan: Plan, family: Family, plain: MeasuredEngine, engine: MeasuredEngine, prompts: Prompts
    ) -> None:
        self._plan = plan
        self._family = family
        self._plain = plain
        self._engine = engine
        self._prompts = prompts

    def cell(self, cell: Cell, tick: Callable[[], None]) -> dict[str, Any]:
        """Measure one situation."""
        tried = self._try(cell)
        tick()
        num_tokens = self._plan.tokens_within(cell.batch, len(self._prompts), tried.speeds)
        runs = Runs()
        for number in range(self._plan.pairs):
            for name, prompts in self._prompts.items():
                batches = self._batches(cell, prompts, number)
                runs.turns.setdefault(name, Turns()).take(
                    {
                        "plain": partial(self._decode, self._plain, batches, 0, num_tokens),
                        "drafted": partial(self._decode, self._engine, batches, tried.best, num_tokens),
                    }
                )
            runs.parts.append(least_stolen(partial(self._parts, cell, tried.best, num_tokens)).result)
            tick()
        return {
            "tried": tried.rates,
            "k": tried.best,
            "tokens_per_prompt": num_tokens,
            **summarise(cell.batch, tried.best, runs),
        }

    def _try(self, cell: Cell) -> Tried:
        """Decode a little at every draft length; plainly, and at the first length, once more before."""
        batches = self._cut(cell, mixed(self._prompts, max(cell.batch, len(self._prompts))), 0)
        lengths = self._family.lengths
        try_it = partial(self._decode_timed, batches=batches)
        try_it(self._plain, 0)
        try_it(self._engine, lengths[0])
        plain = try_it(self._plain, 0)
        found: dict[int, list[tuple[Counted, DecodingSpeed]]] = {length: [] for length in lengths}
        for turn in range(self._plan.try_turns):
            for length in lengths[:: 1 if turn % 2 == 0 else -1]:
                found[length].append(least_stolen(partial(try_it, self._engine, length)).result)
        rates: dict[int, float] = {}
        for length, tried in found.items():
            total = Counted()
            for counted, _ in tried:
                total.add(counted)
            rates[length] = total.rate
        best = max(rates, key=lambda length: rates[length])
        return Tried(rates=rates, speeds=[plain[1], found[best][-1][1]])

    def _decode_timed(
        self, engine: MeasuredEngine, num_draft_tokens: int, *, batches: Sequence[Batch]
    ) -> tuple[Counted, DecodingSpeed]:
        started_s = time.perf_counter()
        counted = self._decode(engine, batches, num_draft_tokens, self._plan.try_tokens)
        beside_s = time.perf_counter() - started_s - counted.seconds
        return counted, DecodingSpeed(tokens_per_s=counted.rate, settling_s=max(0.0, beside_s / len(batches)))

    def _batches(self, cell: Cell, prompts: Sequence[tuple[int, ...]], number: int) -> list[Batch]:
        """Return what is decoded in a pair: in each of them other texts, from the first after the last."""
        each = self._plan.num_prompts_per_turn(cell.batch)
        first = number * each % len(prompts)
        return self._cut(cell, list(itertools.islice(itertools.cycle(prompts), first, first + each)), number)

    def _cut(self, cell: Cell, prompts: Sequence[tuple[int, ...]], seed: int) -> list[Batch]:
        return [
            Batch(
                prompts=prompts[first : first + cell.batch],
                num_tokens=self._plan.text_tokens,
                temperature=cell.temperature,
                seed=seed * len(prompts) + first,
            )
            for first in range(0, len(prompts), cell.batch)
        ]

    @staticmethod
    def _decode(
        engine: MeasuredEngine, batches: Sequence[Batch], num_draft_tokens: int, num_tokens: int
    ) -> Counted:
        total = Counted()
        for batch in batches:
            controller = FixedController(num_draft_tokens)
            total.add(engine.decode_tokens(batch, controller, num_tokens * len(batch.prompts)))
        return total

    def _parts(self, cell: Cell, num_draft_tokens: int, num_tokens: int) -> dict[str, float]:
        """Time the bare forwards at the middle of what is decoded."""
        lengths = [len(prompt) for prompts in self._prompts.values() for prompt in prompts]
        context = sum(lengths) // len(lengths) + num_tokens // 2
        step = partial(Step, batch=cell.batch, context=context)
        plain, own = self._plain.target.runner, self._engine.target.runner
        rows = 1 + self._engine.proposer.capabilities.num_rows_beside
        forwards = {
            "plain_s": (plain, step(rows=1)),
            "verify_s": (own, step(rows=rows + num_draft_tokens)),
        }
        if rows > 1:
            forwards["undrafted_s"] = (own, step(rows=rows))
        seconds = forwards_in_turn(forwards)
        return {"undrafted_s": seconds["plain_s"], **seconds}
