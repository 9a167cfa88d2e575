"""The table of `benchmarks.head_recipes`, written into a page from its raw results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.pages import origin_of, put_into, table

PART = "head recipes"
_LAST = 10
"""Steps that the loss is the mean of."""
SCRIPT = "benchmarks/head_recipes_table.py"


def table_of(results: Mapping[str, Any]) -> str:
    """Return trials, then heads that were there, in Markdown."""
    trials = [
        (
            f"`{one['name']}`",
            _what(one),
            "the target's" if one["starts_from_target"] or one["is_eagle"] else "random",
            *_shares(one),
            f"{statistics.mean(one['losses'][-_LAST:]):.2f}",
        )
        for one in results["trials"]
    ]
    there = [
        (f"`models/demo/heads/{name}`", "finished", "", *_shares(one), "")
        for name, one in results["there"].items()
    ]
    head = ("", "reads the states after", "LM head begins as", "first draft is right", "known", "loss")
    tokens = f"{results['trained_tokens']:,} tokens for each trial; {origin_of(results['environment'])}."
    return f"{table(head, [*trials, *there])}\n\n{tokens}"


def _what(trial: Mapping[str, Any]) -> str:
    if trial["is_eagle"]:
        return "all layers"
    return f"{', '.join(map(str, trial['reads'][:-1]))} and {trial['reads'][-1]} layers"


def _shares(one: Mapping[str, Any]) -> tuple[str, str]:
    return f"{100 * one['agreement']:.1f} %", f"{100 * one['known']:.1f} %"


def with_table(page: str, results: Mapping[str, Any]) -> str:
    """Return the page with its table written anew."""
    return put_into(page, PART, SCRIPT, table_of(results))


def main(
    results: Annotated[Path, typer.Argument(help="What benchmarks.head_recipes has written.")],
    page: Annotated[Path, typer.Argument(help="Page whose table is exchanged.")],
) -> None:
    """Write the table into a page.

    Example: python -m benchmarks.head_recipes_table RESULTS.json docs/drafters/training.md
    """
    page.write_text(with_table(page.read_text(), json.loads(results.read_text())))


if __name__ == "__main__":
    typer.run(main)
