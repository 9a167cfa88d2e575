"""Pictures and tables of what overlapping the groups brings, from the raw results.

python -m benchmarks.overlap_plots benchmarks/results/overlap.json docs/images --page docs/performance.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import overlap_tables
from benchmarks.figures import new_figure, prepare_figures, save_figure
from benchmarks.pages import put_into

_MODES = ("lockstep", "ping_pong", "draft_ahead")


def _over_ratios(drafts: Sequence[Mapping[str, Any]]) -> Any:
    """What each mode brings against lockstep, and rounds against their parts, by T_draft / T_verify."""
    figure, (left, right) = new_figure(2)
    for number, mode in enumerate(_MODES[1:]):
        for batch, line in ((1, ":"), (4, "--"), (16, "-")):
            points = sorted(
                (hits["draft_over_verify"], _median(_cell(draft, batch), "vs_lockstep", mode))
                for draft in drafts
                for hits in draft["on_hits"]
                if hits["batch"] == batch
            )
            left.plot(
                *zip(*points, strict=True), f"o{line}", color=f"C{number}", label=f"{mode}, batch {batch}"
            )
    left.axhline(1.0, color="0.5", lw=0.8)
    left.set(xscale="log", xlabel="T_draft / T_verify, alone", ylabel="tokens/s against lockstep")
    left.legend(frameon=False, fontsize=7)
    every = [hits for draft in drafts for hits in draft["on_hits"]]
    for name, rounds, over in (("draft_ahead", "round_ms", "max"), ("lockstep", "lockstep_round_ms", "sum")):
        points = sorted(
            (hits["draft_over_verify"], hits[rounds]["median"] / _bare(hits, over)) for hits in every
        )
        right.plot(*zip(*points, strict=True), "o", label=f"{name} round over the {over} of its parts")
    right.axhline(1.0, color="0.5", lw=0.8)
    right.set(xscale="log", xlabel="T_draft / T_verify, alone", ylim=(0, None))
    right.legend(frameon=False, fontsize=7)
    return figure


def _bare(hits: Mapping[str, Any], over: str) -> float:
    if over == "max":
        return max(hits["bare_ms"]["overlapped"].values())
    return sum(hits["bare_lockstep_ms"]["alone"].values())


def _over_batches(draft: Mapping[str, Any]) -> Any:
    """Tokens per second of each mode against plain decoding, by batch and acceptance."""
    rates = sorted({cell["cell"]["acceptance"] for cell in draft["cells"]})
    figure, axes = new_figure(len(rates))
    for axis, rate in zip(axes, rates, strict=True):
        own = [
            cell
            for cell in draft["cells"]
            if cell["cell"]["acceptance"] == rate and cell["cell"]["temperature"] == 0.0
        ]
        own.sort(key=lambda cell: cell["cell"]["batch"])
        batches = [str(cell["cell"]["batch"]) for cell in own]
        for mode in _MODES:
            axis.plot(batches, [_median(cell, "vs_plain", mode) for cell in own], "o-", label=mode)
        axis.axhline(1.0, color="0.5", lw=0.8)
        axis.set(xlabel=f"batch, acceptance {rate:g}", ylabel="tokens/s against plain", ylim=(0, None))
    axes[0].legend(frameon=False)
    return figure


def _cell(draft: Mapping[str, Any], batch: int, acceptance: float = 0.95) -> Mapping[str, Any]:
    wanted = {"batch": batch, "temperature": 0.0, "acceptance": acceptance}
    return next(cell for cell in draft["cells"] if cell["cell"] == wanted)


def _median(cell: Mapping[str, Any], against: str, mode: str) -> float:
    return float(cell[against][mode]["median"])


def main(
    results: Annotated[Path, typer.Argument(help="What benchmarks.overlap has written.")],
    folder: Annotated[Path, typer.Argument(help="Where to put the pictures.")],
    page: Annotated[Path | None, typer.Option(help="Page whose tables are exchanged.")] = None,
) -> None:
    """Draw docs/images/overlap-*.svg, and write the tables into a page.

    Example: python -m benchmarks.overlap_plots benchmarks/results/overlap.json docs/images
    """
    prepare_figures()
    read = json.loads(results.read_text())
    drafts = read["drafts"]
    save_figure(_over_ratios(drafts), folder / "overlap-ratios.svg")
    save_figure(
        _over_batches(max(drafts, key=lambda draft: len(draft["cells"]))), folder / "overlap-batches.svg"
    )
    if page is not None:
        tables = overlap_tables.tables(read)
        page.write_text(put_into(page.read_text(), "overlap", overlap_tables.SCRIPT, tables))


if __name__ == "__main__":
    typer.run(main)
