"""What was simulated, as tables for docs/performance.md, from the raw results.

python -m benchmarks.simulate_tables benchmarks/results/simulate.json docs/performance.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.pages import origin_of, put_into, table

SCRIPT = "benchmarks/simulate_tables.py"
_TRACE = "chat"
"""Outputs of the other are so short that its goodput varies too much between runs of this length."""

Result = Mapping[str, Any]


def write_tables(page: str, results: Result) -> str:
    """Return the page with all tables of the simulation exchanged.

    Raises:
        UserError: the page has no place for one of them.
    """
    parts = {
        "modes": _modes(results["modes"]),
        "pools": _pools(results["pools"]),
        "sizes": _sizes(results["scaling"]),
        "controller": _controller(results["loads"]),
        "failures": _failures(results["failures"]),
    }
    page = put_into(
        page, "simulation", SCRIPT, f"Simulated on {origin_of(results['environment'], with_processor=False)}."
    )
    for name, text in parts.items():
        page = put_into(page, f"simulation, {name}", SCRIPT, text)
    return page


def _modes(rows: Sequence[Result]) -> str:
    head = (
        "drafter",
        "sequences",
        "T_draft / T_verify",
        "`ping_pong`",
        "`draft_ahead`",
        "(lockstep / plain)",
    )
    return table(
        head,
        [
            (
                row["drafter"],
                row["batch"],
                f"{row['draft_over_verify']:.2f}",
                f"{row['vs_lockstep']['ping_pong']:.2f}",
                f"{row['vs_lockstep']['draft_ahead']:.2f}",
                f"{row['vs_plain']['lockstep']:.2f}",
            )
            for row in rows
            if row["trace"] == _TRACE
        ],
    )


def _pools(pools: Result) -> str:
    rule, by_mode = pools["goodput_by_rule"], pools["median_error_by_mode"]
    errors = ", ".join(f"`{mode}` {_percent(error)}" for mode, error in by_mode.items())
    head = ("X", "error of L / X, median", "by mode", "90th percentile", "goodput by the rule, of the best")
    row = (
        f"{pools['x']:.2f}",
        _percent(pools["median_error"]),
        errors,
        _percent(pools["p90_error"]),
        f"median {rule['median']:.2f}, worst {rule['worst']:.2f}",
    )
    names = ("drafter", "k", "batch", "mode")
    worst = table(
        ("most wrong: drafter", "k", "sequences", "mode", "load L", "enough workers per group"),
        [
            (*(one[name] for name in names), f"{one['load']:.2f}", f"{one['workers']:.2f}")
            for one in pools["worst"]
        ],
    )
    return f"{table(head, [row])}\n\n{worst}"


def _sizes(rows: Sequence[Result]) -> str:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    by_layout: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        outcome = row["outcome"]
        layout = by_layout.setdefault((outcome["num_groups"], row["pools"]), {})
        layout[row["kind"]] = outcome["goodput"] / outcome["num_groups"]
    names = ["plain", *(f"`{kind}`" for kind in kinds if kind != "plain")]
    return table(
        ("groups", "pools", *names),
        [
            (groups, pools, *(f"{goodput[kind]:.0f}" for kind in kinds))
            for (groups, pools), goodput in by_layout.items()
        ],
    )


def _with_bounds(ratio: Result) -> str:
    return f"{ratio['median']:.2f} ({ratio['lower']:.2f}-{ratio['upper']:.2f})"


def _controller(rows: Sequence[Result]) -> str:
    head = (
        "drafter",
        "requests per group",
        "best fixed",
        "best fixed / plain",
        "controller / best fixed",
        "controller / plain",
    )
    return table(
        head,
        [
            (
                row["drafter"],
                row["batch"],
                row["best_fixed"],
                f"{row['best_fixed_vs_plain']['median']:.2f}",
                _with_bounds(row["controller_vs_best_fixed"]),
                _with_bounds(row["controller_vs_plain"]),
            )
            for row in rows
        ],
    )


def _failures(failures: Result) -> str:
    phases = table(
        ("", "requests", "first token, p95 (ms)", "per token, p50 (ms)", "p95"),
        [
            (
                name,
                phase["requests"],
                f"{phase['ttft_p95_ms']:.0f}",
                f"{phase['token_p50_ms']:.1f}",
                f"{phase['token_p95_ms']:.1f}",
            )
            for name, phase in failures["phases"].items()
        ],
    )
    ended = (
        f"{failures['finished']} of {failures['arrived']} requests ended with all their tokens; "
        f"{failures['replayed']} went on in another group."
    )
    return f"{phases}\n\n{ended}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def main(
    results: Annotated[Path, typer.Argument(help="What benchmarks.simulate has written.")],
    page: Annotated[Path, typer.Argument(help="Page whose tables are exchanged.")],
) -> None:
    """Write the tables of the simulation into a page.

    Example: python -m benchmarks.simulate_tables benchmarks/results/simulate.json docs/performance.md
    """
    page.write_text(write_tables(page.read_text(), json.loads(results.read_text())))


if __name__ == "__main__":
    typer.run(main)
