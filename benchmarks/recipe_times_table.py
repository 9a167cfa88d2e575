"""The table of `benchmarks.recipe_times`, written into a page from its raw results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.pages import origin_of, put_into, table

PART = "recipe times"
SCRIPT = "benchmarks/recipe_times_table.py"


def table_of(results: Mapping[str, Any]) -> str:
    """Return a line for each recipe, in Markdown."""
    rows = [
        (
            f"`{one['recipe']}`",
            f"{one['steps']:,}",
            f"{one['tokens'] / 1e6:.1f} M",
            f"{statistics.mean(one['s_per_step']):.2f}",
            f"{min(one['s_per_step']):.2f}-{max(one['s_per_step']):.2f}",
            f"{one['minutes']:.0f}",
        )
        for one in results["recipes"]
    ]
    head = ("recipe", "steps", "tokens", "seconds a step", "from - to", "minutes")
    num_threads = results["plan"]["num_threads"]
    origin = f"{num_threads} threads, {origin_of(results['environment'])}."
    return f"{table(head, rows)}\n\n{origin}"


def with_table(page: str, results: Mapping[str, Any]) -> str:
    """Return the page with its table written anew."""
    return put_into(page, PART, SCRIPT, table_of(results))


def main(
    results: Annotated[Path, typer.Argument(help="What benchmarks.recipe_times has written.")],
    page: Annotated[Path, typer.Argument(help="Page whose table is exchanged.")],
) -> None:
    """Write the table into a page.

    Example: python -m benchmarks.recipe_times_table RESULTS.json docs/drafters/training.md
    """
    page.write_text(with_table(page.read_text(), json.loads(results.read_text())))


if __name__ == "__main__":
    typer.run(main)
