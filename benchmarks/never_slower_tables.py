"""The controller beside plain decoding and fixed settings, as tables for docs/performance.md.

python -m benchmarks.never_slower_tables docs/performance.md benchmarks/results/never-slower.json
A second result, if any, replaces what it has of the first.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.pages import cells_and_origins, disturbed_cells, origin_of, put_into, table
from benchmarks.report import PairedRatio
from benchmarks.turns import LIMIT

PART, SCRIPT = "controller", "benchmarks/never_slower_tables.py"

Result = Mapping[str, Any]


def tables(results: Sequence[Result]) -> str:
    """Return all of them, in Markdown: of each cell and each load step, what the last result has of it."""
    cells: dict[str, Result] = {}
    steps: dict[str, Result] = {}
    for result in results:
        for cell in result["cells"]:
            cells[json.dumps(cell["cell"], sort_keys=True)] = {"measured": result["environment"], **cell}
        for step in result["steps"]:
            steps[step["deployment"]] = {"measured": result["environment"], **step}
    deployments = dict.fromkeys(cell["cell"]["deployment"] for cell in cells.values())
    parts = []
    for deployment in deployments:
        own = [cell for cell in cells.values() if cell["cell"]["deployment"] == deployment]
        parts += [cells_and_origins(own), _grid(deployment, own), _in_short(own, steps.get(deployment))]
    return "\n\n".join(parts)


def _grid(deployment: str, cells: Sequence[Result]) -> str:
    rates = sorted({one["cell"]["acceptance"] for one in cells})
    by_situation: dict[tuple[int, int], dict[float, Result]] = {}
    for one in cells:
        where = one["cell"]
        by_situation.setdefault((where["context"], where["batch"]), {})[where["acceptance"]] = one
    rows = [
        (batch, context, *(_ratios(of[rate]) if rate in of else "" for rate in rates))
        for (context, batch), of in sorted(by_situation.items())
    ]
    head = (
        f"{deployment}: batch",
        "context",
        f"acceptance {rates[0]:g}",
        *(f"{rate:g}" for rate in rates[1:]),
    )
    return table(head, rows)


def _ratios(cell: Result) -> str:
    vs_plain, vs_best = (_marked(cell[name]) for name in ("vs_plain", "vs_best_fixed"))
    return f"{vs_plain} ({vs_best})"


def _marked(ratio: Result) -> str:
    median = f"{ratio['median']:.2f}"
    return f"**{median}**" if ratio["upper"] < LIMIT else median


def _in_short(cells: Sequence[Result], step: Result | None) -> str:
    lines = []
    for name, beside in (("vs_plain", "plain decoding"), ("vs_best_fixed", "the best fixed setting")):
        ratios = [cell[name] for cell in cells]
        upper = [ratio["upper"] for ratio in ratios]
        above = sum(bound >= LIMIT for bound in upper)
        medians = sorted(ratio["median"] for ratio in ratios)
        lines.append(
            f"- Beside {beside}: {above} of {len(ratios)} cells are not below {LIMIT} with 95 % confidence; "
            f"the smallest upper bound is {min(upper):.3f}, the smallest median {medians[0]:.3f}, the middle "
            f"one {medians[len(medians) // 2]:.3f}."
        )
    if pooled := _pooled(cells):
        lines.append(f"- {pooled}")
    if disturbed := disturbed_cells(cells):
        lines.append(f"- {disturbed}")
    cold = sorted(min(cell["cold"]["vs_plain"]) for cell in cells)
    first_s, second_s = cells[0]["cold"]["seconds"]
    lines.append(
        f"- Of the first {first_s:g} s of a cell, in which nothing is known of acceptance, and the "
        f"{second_s:g} s behind them, the worse part has {cold[0]:.2f} of plain decoding at worst, "
        f"{cold[len(cold) // 2]:.2f} in the middle."
    )
    if step is not None:
        plan, phases = step["plan"], step["phases"]
        each = ", ".join(f"{phases[name]:.2f}" for name in ("low", "high", "low again"))
        lines.append(
            f"- When load steps from {plan['low']} to {plan['high']} requests and back, it has {each} of "
            f"plain decoding in the three phases; the worst second has {step['worst_bin']:.2f} (measured on "
            f"{origin_of(step['measured'])})."
        )
    return "\n".join(lines)


def _pooled(cells: Sequence[Result]) -> str | None:
    """Where nothing is drafted in the end, cells of a shape measure one thing: what the controller costs.

    A single cell's interval is too wide for a few per cent.
    """
    pairs: dict[tuple[int, int], list[float]] = {}
    for cell in cells:
        if cell["chosen"]["mean_num_draft_tokens"] == 0:
            where = cell["cell"]["batch"], cell["cell"]["context"]
            pairs.setdefault(where, []).extend(cell["vs_plain"]["values"])
    if not pairs:
        return None
    every = PairedRatio(tuple(value for values in pairs.values() for value in values))
    worst, ratio = min(
        ((where, PairedRatio(tuple(values))) for where, values in pairs.items()),
        key=lambda one: one[1].upper,
    )
    return (
        "The pairs of all cells in which nothing is drafted in the end, taken together, have "
        f"{_between(every)} of plain decoding; of those with one batch and context, the lowest are at "
        f"{worst[0]} x {worst[1]}: {_between(ratio)}."
    )


def _between(ratio: PairedRatio) -> str:
    mean = math.exp(statistics.fmean(map(math.log, ratio.values)))
    return f"{mean:.3f} ({ratio.lower:.3f} to {ratio.upper:.3f}, {len(ratio.values)} pairs)"


def main(
    page: Annotated[Path, typer.Argument(help="Page whose tables are exchanged.")],
    results: Annotated[list[Path], typer.Argument(help="What benchmarks.never_slower has written.")],
) -> None:
    """Write the tables of the controller into a page.

    Example: python -m benchmarks.never_slower_tables docs/performance.md benchmarks/results/never-slower.json
    """
    read = [json.loads(one.read_text()) for one in results]
    page.write_text(put_into(page.read_text(), PART, SCRIPT, tables(read)))


if __name__ == "__main__":
    typer.run(main)
