"""What a GPU has shown of drafters, as tables: heads trained as long as each other, and families there.

python -m benchmarks.gpu_drafter_tables benchmarks/results docs/drafters/{training,comparison}.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.drafters_tables import Costs
from benchmarks.pages import origin_of, put_into, table

SCRIPT = "benchmarks/gpu_drafter_tables.py"
HEADS, FAMILIES = "gpu heads", "gpu families"
"""Parts of the pages."""

Result = Mapping[str, Any]


def heads_table(results: Result) -> str:
    """Return what each head accepts on texts that no head has read, in Markdown."""
    heads: Mapping[str, Result] = results["heads"]
    first = next(iter(heads.values()))
    rows = [
        (
            f"`{name}`",
            f"{one['parameters'] / 1e6:.2f} M",
            f"{one['elapsed_s']:.0f}",
            *(text for temperature in ("0.0", "0.7") for text in _accepted(one, temperature)),
        )
        for name, one in sorted(heads.items(), key=_tokens_per_round)
    ]
    head = (
        "heads",
        "parameters",
        "seconds",
        "tokens per round at 0",
        "draft token 1 / 2 / ... stands",
        "tokens per round at 0.7",
        "draft token 1 / 2 / ... stands",
    )
    told = (
        f"{first['trained_tokens'] / 1e6:.1f} M tokens each, {results['at_once']} trainings at the same time "
        f"on one GPU ({results['gpu'].removeprefix('cuda ')}); "
        f"{origin_of(results['environment'], with_processor=False)}."
    )
    return f"{table(head, rows)}\n\n{told}"


def _tokens_per_round(named: tuple[str, Result]) -> float:
    return float(named[1]["acceptance"]["0.0"]["tokens_per_round"])


def _accepted(one: Result, temperature: str) -> tuple[str, str]:
    found = one["acceptance"][temperature]
    reached = " / ".join(f"{share:.2f}" for share in found["reached"])
    return f"{found['tokens_per_round']:.2f} (k = {found['k']})", reached


def families_table(results: Result, before: Result) -> str:
    """Return what was measured one request at a time, beside what it was before trees were graphs."""
    earlier = {_place(cell): cell for cell in before["cells"]}
    now = {_place(cell): cell for cell in results["cells"]}
    places = sorted({place for place in (*now, *earlier) if place[1] == 1}, key=_order_of(results, before))
    rows = [_row(place, now.get(place), earlier.get(place)) for place in places]
    head = (
        "family",
        "temperature",
        "k",
        "tokens / cost of a pass",
        "speedup",
        "before: tokens / cost of a pass",
        "speedup",
    )
    origins = dict.fromkeys(
        origin_of(cell["measured"], with_processor=False) for cell in (*results["cells"], *before["cells"])
    )
    gpu = results["cells"][0]["gpu"].removeprefix("cuda ")
    return f"{table(head, rows)}\n\nMeasured {'; '.join(sorted(origins))}; one {gpu}, bf16."


def _place(cell: Result) -> tuple[str, int, float]:
    named = cell["cell"]
    return named["family"], named["batch"], named["temperature"]


def _order_of(*results: Result) -> Any:
    """Return a key that sorts places by family as the benchmark has them, then by temperature."""
    from benchmarks.drafter_families import FAMILIES as KNOWN

    names = [family.name for family in KNOWN]
    return lambda place: (names.index(place[0]), place[2])


def _row(place: tuple[str, int, float], now: Result | None, before: Result | None) -> tuple[str, ...]:
    shown = now or before
    assert shown is not None
    return (
        f"`{place[0]}`",
        f"{place[2]:g}",
        "-" if now is None else str(now["k"]),
        *_found(now),
        *_found(before),
    )


def _found(cell: Result | None) -> tuple[str, str]:
    if cell is None:
        return "-", "-"
    ratio = cell["speedup"]
    return str(Costs.of(cell)), f"{ratio['median']:.2f} ({ratio['lower']:.2f}-{ratio['upper']:.2f})"


def main(
    folder: Annotated[Path, typer.Argument(help="Where the raw results are.")],
    training: Annotated[Path, typer.Argument(help="Page about training.")],
    comparison: Annotated[Path, typer.Argument(help="Page about all families.")],
) -> None:
    """Write the tables into their pages."""
    heads, now, before = (
        json.loads((folder / f"{name}.json").read_text())
        for name in ("gpu-heads", "drafters-gpu", "drafters-gpu-before")
    )
    training.write_text(put_into(training.read_text(), HEADS, SCRIPT, heads_table(heads)))
    tables = put_into(comparison.read_text(), FAMILIES, SCRIPT, families_table(now, before))
    comparison.write_text(tables)


if __name__ == "__main__":
    typer.run(main)
