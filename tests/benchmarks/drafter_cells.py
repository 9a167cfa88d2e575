"""Cells of `benchmarks.drafters` as if they had been measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.draft_counts import DraftCounts
from benchmarks.drafter_families import PLAIN
from benchmarks.drafter_texts import CLASSES
from benchmarks.drafters_plan import AS_IT_IS, INFLATED, Cell
from benchmarks.drafters_summary import Runs, summarise
from benchmarks.report import PairedRatio, Spread
from benchmarks.steady import Counted
from benchmarks.turns import Turns


def counted(rate: float, tokens_per_pass: float, drafted: int, draft_s: float, batch: int) -> Counted:
    passes = 100 * batch
    accepted = round((tokens_per_pass - 1.0) * passes)
    return Counted(
        num_tokens=round(tokens_per_pass * passes),
        seconds=tokens_per_pass * passes / rate,
        num_rounds=100,
        drafts=DraftCounts(
            num_drafts=passes,
            num_draft_tokens=drafted * passes,
            accepted=(accepted,) if drafted else (),
            draft_s=100 * draft_s,
            verify_s=1.0,
        ),
    )


def runs(
    plain: float,
    drafted: dict[str, float],
    batch: int = 1,
    pairs: int = 4,
    *,
    tokens_per_pass: float = 1.5,
    draft_s: float = 0.001,
) -> Runs:
    """Two tokens are drafted in each pass; plain steps take 10 ms, those that verify 12 ms."""
    made = Runs()
    for name, rate in drafted.items():
        turns = made.turns[name] = Turns()
        turns.counted["plain"] = [counted(plain, 1.0, 0, 0.0, batch)] * pairs
        turns.counted["drafted"] = [counted(rate, tokens_per_pass, 2, draft_s, batch)] * pairs
    made.parts = [{"plain_s": 0.010, "undrafted_s": 0.010, "verify_s": 0.012}] * pairs
    return made


def a_cell(
    family: str,
    rates: dict[str, float],
    plain: float = 100.0,
    *,
    tokens_per_pass: float = 1.5,
    draft_s: float = 0.001,
    day: int = 2,
    **changes: Any,
) -> dict[str, Any]:
    """Return a cell, measured on a day of January, one commit a day."""
    fields: dict[str, Any] = {"target": INFLATED, "batch": 1, "temperature": 0.0, **changes}
    made = runs(plain, rates, fields["batch"], tokens_per_pass=tokens_per_pass, draft_s=draft_s)
    return {
        "cell": Cell(family=family, **fields),
        "tried": {"2": 1.0},
        "k": 2,
        "tokens_per_prompt": 48,
        "memory_bytes": 12_000_000,
        "training": {"elapsed_s": 600.0, "parameters": 500_000, "trained_tokens": 4_096_000},
        "measured": {
            "date": f"2026-01-{day:02}T00:00:00",
            "commit": str(day - 2) * 40,
            "processor": "P",
            "num_threads": 2,
        },
        **summarise(fields["batch"], 2, made),
    }


def some_cells() -> list[dict[str, Any]]:
    return [
        a_cell(PLAIN, dict.fromkeys(CLASSES, 50.0)),
        a_cell("ngram", {"code": 110.0, "docstring": 110.0, "repeated": 360.0}),
        a_cell("eagle", dict.fromkeys(CLASSES, 140.0)),
        a_cell("eagle", dict.fromkeys(CLASSES, 90.0), batch=32),
        a_cell("eagle", dict.fromkeys(CLASSES, 400.0), temperature=0.7),
        a_cell("eagle", dict.fromkeys(CLASSES, 900.0), target=AS_IT_IS, day=3),
    ]


def as_measured(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cell that was read from a file as it was before it was written there."""
    return {**_restored(cell), "cell": Cell(**cell["cell"])}


def _restored(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if "values" in value:
        return (PairedRatio if "lower" in value else Spread)(tuple(value["values"]))
    return {name: _restored(one) for name, one in value.items()}
