"""Pictures and tables of what every family of drafters brings, from the raw results.

    python -m benchmarks.drafters_plots benchmarks/results/drafters.json docs/images \
        --page docs/drafters/comparison.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.drafter_families import PLAIN
from benchmarks.figures import new_figure, prepare_figures, save_figure
from specdec.core.errors import UserError

BEGIN = "<!-- measured: written by benchmarks/drafters_plots.py -->"
END = "<!-- measured: end -->"
PICTURE = "drafters.svg"
_MOST_POSITIONS = 4

Cell = Mapping[str, Any]


def draw(cells: Sequence[Cell]) -> Any:
    """Speedup by family and batch size, measured against possible, and acceptance by position."""
    figure, (bars, both, reached) = new_figure(3)
    figure.set_size_inches(13.5, 5.0)
    target = _costliest(cells)
    own = [one for one in cells if one["cell"]["target"] == target and one["cell"]["temperature"] == 0.0]
    names = list(dict.fromkeys(one["cell"]["family"] for one in own))
    batches = sorted({one["cell"]["batch"] for one in own})
    height = 0.8 / len(batches)
    for number, batch in enumerate(batches):
        by_name = {one["cell"]["family"]: one for one in own if one["cell"]["batch"] == batch}
        places = [index + number * height for index, name in enumerate(names) if name in by_name]
        values = [by_name[name]["speedup"]["median"] for name in names if name in by_name]
        bars.barh(places, values, height, color=f"C{number}", label=f"batch {batch}")
    bars.set_yticks([index + 0.4 - height / 2 for index in range(len(names))], names, fontsize=7)
    bars.invert_yaxis()
    bars.axvline(1.0, color="0.5", lw=0.8)
    bars.set(xlabel=f"tokens/s against plain decoding ({target}, temperature 0)")
    bars.legend(frameon=False, fontsize=7)
    drafting = [one for one in cells if one["cell"]["family"] != PLAIN]
    for number, name in enumerate(dict.fromkeys(one["cell"]["target"] for one in drafting)):
        points = [
            (one["possible"]["median"], one["speedup"]["median"])
            for one in drafting
            if one["cell"]["target"] == name
        ]
        both.plot(*zip(*points, strict=True), "o", ms=4, color=f"C{number}", label=name)
    most = max((one["possible"]["median"] for one in drafting), default=1.0)
    both.plot([0, most], [0, most], color="0.5", lw=0.8)
    both.set(xlabel="possible, from acceptance and costs", ylabel="measured", xlim=(0, None), ylim=(0, None))
    both.legend(frameon=False, fontsize=7)
    for number, one in enumerate(
        one for one in own if one["cell"]["batch"] == batches[0] and one["cell"]["family"] != PLAIN
    ):
        shares = one["reached"]
        line = "-" if number < 10 else ":"
        reached.plot(
            range(1, 1 + len(shares)),
            shares,
            f"o{line}",
            ms=3,
            color=f"C{number % 10}",
            label=one["cell"]["family"],
        )
    reached.set(xlabel="draft token", ylabel=f"share of passes, batch {batches[0]}", ylim=(0, 1))
    reached.legend(frameon=False, fontsize=5, ncols=2)
    return figure


def tables(results: Mapping[str, Any]) -> str:
    """Return the measured part of the page, in Markdown."""
    cells: Sequence[Cell] = results["cells"]
    environment = results["environment"]
    lines = [
        f"Measured {environment['date'][:10]} at commit {environment['commit'][:12]}, "
        f"{environment['processor']}, {environment['num_threads']} threads, bf16.",
    ]
    for target in dict.fromkeys(one["cell"]["target"] for one in cells):
        own = [one for one in cells if one["cell"]["target"] == target]
        lines += ["", f"### The {target} target, one request at a time", "", *_in_detail(own)]
        lines += ["", f"### The {target} target, by batch size", "", *_by_batch(own)]
    missing = results.get("missing") or ()
    if missing:
        lines += ["", f"Not measured, for want of trained heads: {', '.join(missing)}."]
    return "\n".join(lines)


def _in_detail(cells: Sequence[Cell]) -> list[str]:
    alone = [one for one in cells if one["cell"]["batch"] == min(one["cell"]["batch"] for one in cells)]
    classes = list(alone[0]["classes"])
    lines = _head(
        "family",
        "temperature",
        "k",
        "tokens per pass",
        "reached 1 / 2 / 3 / 4",
        "draft cost",
        "MB",
        "trained (min)",
        "speedup",
        *classes,
        "possible",
        "if drafts were free",
        "share",
    )
    for one in alone:
        training = one.get("training") or {}
        trained_s = training.get("elapsed_s")
        ratio, share = one["speedup"], one["share_of_possible"]
        lines.append(
            _row(
                one["cell"]["family"],
                f"{one['cell']['temperature']:g}",
                str(one["k"]),
                f"{one['tokens_per_pass']:.2f}",
                " / ".join(f"{value:.2f}" for value in one["reached"][:_MOST_POSITIONS]) or "-",
                f"{one['draft_cost']:.2f}",
                f"{one['memory_bytes'] / 1e6:.1f}",
                "-" if trained_s is None else f"{trained_s / 60:.0f}",
                f"{ratio['median']:.2f} ({ratio['lower']:.2f}-{ratio['upper']:.2f})",
                *(f"{one['classes'][name]['speedup']['median']:.2f}" for name in classes),
                f"{one['possible']['median']:.2f}",
                f"{one['possible_if_free']['median']:.2f}",
                f"{share['median']:.2f}",
            )
        )
    return lines


def _by_batch(cells: Sequence[Cell]) -> list[str]:
    places = list(dict.fromkeys((one["cell"]["temperature"], one["cell"]["batch"]) for one in cells))
    places.sort()
    lines = _head("family", *(f"batch {batch}, temperature {warmth:g}" for warmth, batch in places))
    for name in dict.fromkeys(one["cell"]["family"] for one in cells):
        own = {
            (one["cell"]["temperature"], one["cell"]["batch"]): one
            for one in cells
            if one["cell"]["family"] == name
        }
        lines.append(_row(name, *(_short(own.get(place)) for place in places)))
    return lines


def _short(cell: Cell | None) -> str:
    """Speedup, and in brackets tokens per second, tokens per pass and the share of what is possible."""
    if cell is None:
        return "-"
    rates = [rate for one in cell["classes"].values() for rate in one["tokens_per_s"]["drafted"]]
    return (
        f"{cell['speedup']['median']:.2f} ({sum(rates) / len(rates):.0f}/s, "
        f"{cell['tokens_per_pass']:.2f}, {cell['share_of_possible']['median']:.2f})"
    )


def _head(*names: str) -> list[str]:
    return [_row(*names), _row(*("---" for _ in names))]


def _row(*fields: str) -> str:
    return f"| {' | '.join(fields)} |"


def _costliest(cells: Sequence[Cell]) -> str:
    """Return the target whose steps take longest."""
    slowest = max(cells, key=lambda one: one["bare"]["plain_s"]["median"])
    name: str = slowest["cell"]["target"]
    return name


def put_into(page: str, measured: str) -> str:
    """Return a page with its measured part exchanged.

    Raises:
        UserError: the page has no place for it.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"the page needs a line {BEGIN} and behind it a line {END}")
    return f"{before}{BEGIN}\n\n{measured}\n\n{END}{after}"


def main(
    results: Annotated[Path, typer.Argument(help="What benchmarks.drafters has written.")],
    folder: Annotated[Path, typer.Argument(help="Where to put the picture.")],
    page: Annotated[
        Path | None, typer.Option(help="Page whose measured part is exchanged for the tables.")
    ] = None,
) -> None:
    """Draw drafters.svg, and write the tables into a page.

    Example: python -m benchmarks.drafters_plots benchmarks/results/drafters.json docs/images
    """
    read = json.loads(results.read_text())
    try:
        prepare_figures()
        save_figure(draw(read["cells"]), folder / PICTURE)
        if page is not None:
            page.write_text(put_into(page.read_text(), tables(read)))
    except UserError as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}")
        raise typer.Exit(2) from error


if __name__ == "__main__":
    typer.run(main)
