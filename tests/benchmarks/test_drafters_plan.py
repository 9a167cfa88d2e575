"""What is measured of families of drafters: in which order, on how much, and how long the rest takes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from benchmarks.drafter_families import FAMILIES, PLAIN
from benchmarks.drafters_plan import AS_IT_IS, FULL, INFLATED, QUICK, Cell, DecodingSpeed, rest_of


def test_the_plan_is_what_is_asked_for() -> None:
    cells = FULL.cells(FAMILIES)
    assert {(cell.target, cell.batch, cell.temperature) for cell in cells if cell.family == "eagle3"} == {
        (target, batch, temperature)
        for target in (AS_IT_IS, INFLATED)
        for batch in (1, 8, 32)
        for temperature in (0.0, 0.7)
    }
    assert FULL.inflated_parameters == 100e6
    assert FULL.pairs % 2 == 0, "as often in one order as in the other"
    assert FULL.num_prompts >= max(FULL.batches), "no text twice in a batch"
    assert QUICK.cells(FAMILIES[:1]) == [Cell(target=INFLATED, family=PLAIN, batch=1, temperature=0.0)], (
        "headlines are of these"
    )


def test_what_headlines_are_of_is_measured_first() -> None:
    cells = FULL.cells(FAMILIES)
    first = cells[: 2 * len(FAMILIES)]
    assert {(cell.batch, cell.target) for cell in first} == {(1, INFLATED)}
    assert [cell.family for cell in first[::2]] == [family.name for family in FAMILIES]
    assert len(set(cells)) == len(cells) == len(FAMILIES) * 12
    by_engine = [(cell.batch, cell.target, cell.family) for cell in cells]
    assert by_engine == list(itertools.chain.from_iterable((one, one) for one in by_engine[::2])), (
        "an engine is opened once for both temperatures"
    )


def test_a_cell_that_would_take_too_long_decodes_fewer_tokens() -> None:
    plan = dataclasses.replace(FULL, pairs=2, prompts_per_turn=4, tokens_per_prompt=48, cell_s=12.0)
    fast = DecodingSpeed(tokens_per_s=1000.0, settling_s=0.0)
    assert plan.tokens_within(1, 3, [fast, fast]) == 48
    slow = DecodingSpeed(tokens_per_s=80.0, settling_s=0.0)
    # 2 s for a class of a pair: 4 prompts of n tokens, twice
    assert plan.tokens_within(1, 3, [slow, slow]) == 20
    assert plan.tokens_within(1, 3, [slow, dataclasses.replace(slow, settling_s=0.05)]) == 18
    assert plan.tokens_within(8, 3, [slow, dataclasses.replace(slow, settling_s=0.05)]) == 9, "one batch of 8"
    assert plan.tokens_within(32, 3, [slow, slow]) == 8, "fewer say nothing"


def test_the_rest_takes_as_long_as_others_of_its_kind_did() -> None:
    def cell(family: str, **changes: Any) -> Cell:
        fields: dict[str, Any] = {"target": INFLATED, "batch": 1, "temperature": 0.0, **changes}
        return Cell(family=family, **fields)

    taken_s = {cell("ngram"): 60.0, cell("eagle"): 180.0, cell("eagle", target=AS_IT_IS): 10.0}
    rest = rest_of([cell("mtp"), cell("mtp", temperature=0.7), cell("mtp", batch=8)], taken_s)
    assert (rest.num_cells, rest.seconds, rest.num_unknown) == (3, 240.0, 1)
    assert str(rest) == (
        "3 cells are left; 2 of them take about 4 min; 1 are of situations of which none was measured yet"
    )
    assert str(rest_of([], taken_s)) == "0 cells are left"
