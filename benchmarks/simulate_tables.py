"""What was simulated, as tables for docs/performance.md, from the raw results.

python -m benchmarks.simulate_tables benchmarks/results/simulate.json docs/performance.md
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.pages import origin_of, put_into, table

SCRIPT = "benchmarks/simulate_tables.py"
_TRACE = "chat"
"""Outputs of the other are so short that its goodput varies too much between runs of this length."""

Result = Mapping[str, Any]


def write_tables(page: str, results: Result) -> str:
    """Return the page with the tables of all that was simulated exchanged.

    Raises:
        UserError: the page has no place for one of them.
    """
    page = put_into(
        page, "simulation", SCRIPT, f"Simulated on {origin_of(results['environment'], with_processor=False)}."
    )
    for key, (name, write) in _PARTS.items():
        if key in results:
            page = put_into(page, f"simulation, {name}", SCRIPT, write(results[key]))
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


def _equal_devices(rows: Sequence[Result]) -> str:
    modes = list(dict.fromkeys(one["mode"] for row in rows for one in row["apart"]))
    situation, ratios = ("drafter", "traffic", "requests"), [f"`{mode}` / colocated" for mode in modes]
    by_rule = table(
        (*situation, "plain", "colocated / plain", "drafter on", "on one GPU / colocated", *ratios),
        [
            (
                *_situation(row),
                f"{row['plain_per_gpu']:.0f}",
                f"{row['colocated_vs_plain']:.2f}",
                f"{row['colocated_width']} GPUs",
                f"{row['on_one_vs_colocated']:.2f}",
                *(_by_rule(row, mode) for mode in modes),
            )
            for row in rows
        ],
    )
    by_size = table(
        (*situation, "target groups", *ratios),
        [
            (*_situation(row), groups, *(_of_widths(row, mode, groups) for mode in modes))
            for row in rows
            if row["has_all_sizes"]
            for groups in sorted({one["groups"] for one in row["apart"]})
        ],
    )
    picture = "![draft workers beside colocated drafting](images/simulate-equal-devices.svg)"
    return "\n\n".join((_verdict(rows), by_rule, by_size, picture))


def _situation(row: Result) -> tuple[str, str, int]:
    return row["drafter"], row["trace"], row["batch"]


def _by_rule(row: Result, mode: str) -> str:
    """Return the ratios of what the rule asks for, and how many target groups that means."""
    (groups,) = {one["groups"] for one in row["apart"] if one["mode"] == mode and one["is_by_rule"]}
    return f"{_of_widths(row, mode, groups)} ({groups})"


def _of_widths(row: Result, mode: str, groups: int) -> str:
    own = [one for one in row["apart"] if one["mode"] == mode and one["groups"] == groups]
    own.sort(key=lambda one: one["width"])
    return ", ".join(f"{one['vs_colocated']:.2f}" for one in own)


def _verdict(rows: Sequence[Result]) -> str:
    """Say how often groups with draft workers are ahead, by more than one run may be wrong."""
    by_rule = [(row, one) for row in rows for one in row["apart"] if one["is_by_rule"]]
    ratios = [one["vs_colocated"] for _, one in by_rule]
    bests = [max(one["vs_colocated"] for other, one in by_rule if other is row) for row in rows]
    num_ahead, num_behind = sum(best > 1.05 for best in bests), sum(best < 0.95 for best in bests)
    num_slower = sum(one["vs_plain"] < 0.95 for _, one in by_rule)
    row, best = max(by_rule, key=lambda pair: pair[1]["vs_colocated"])
    drafter, traffic, requests = _situation(row)
    return (
        f"In {num_ahead} of {len(rows)} situations the best mode and width, with as many draft workers as "
        f"the rule says, is more than 5 % ahead of colocated drafting, in {num_behind} more than 5 % behind "
        f"it. Of all {len(ratios)} clusters with draft workers the median has "
        f"{statistics.median(ratios):.2f} of colocated drafting, the worst {min(ratios):.2f}, the best "
        f"{max(ratios):.2f} (`{best['mode']}`, drafter {drafter}, {traffic}, {requests} requests, "
        f"{best['groups']} target groups, {best['width']} GPUs per draft worker); {num_slower} are more than "
        "5 % behind plain decoding."
    )


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
    beside_best, beside_plain = (
        [row[f"controller_vs_{other}"] for row in rows] for other in ("best_fixed", "plain")
    )
    worst = (
        f"The lowest median is {_lowest(beside_plain, 'median')} of plain decoding and "
        f"{_lowest(beside_best, 'median')} of the best fixed choice, the lowest upper bounds are "
        f"{_lowest(beside_plain, 'upper')} and {_lowest(beside_best, 'upper')}."
    )
    cells = table(
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
    return f"{cells}\n\n{worst}"


def _lowest(ratios: Sequence[Result], value: str) -> str:
    return f"{min(ratio[value] for ratio in ratios):.2f}"


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


_PARTS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "modes": ("modes", _modes),
    "pools": ("pools", _pools),
    "equal_devices": ("equal devices", _equal_devices),
    "scaling": ("sizes", _sizes),
    "loads": ("controller", _controller),
    "failures": ("failures", _failures),
    "controlled_failures": ("failures, k controlled", _failures),
}
"""By result: the part of the page that tells of it, and what writes that. Parts that results have nothing of
stay as they are."""


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
