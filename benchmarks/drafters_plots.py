"""Pictures and tables of what every family of drafters brings, from the raw results.

    python -m benchmarks.drafters_plots benchmarks/results/drafters.json docs/images \
        --page docs/drafters/comparison.md --trees docs/drafters/trees.md
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.drafter_families import PLAIN
from benchmarks.drafters_tables import Cell, costliest, measured, published, trees
from benchmarks.figures import new_figure, prepare_figures, save_figure
from benchmarks.pages import put_into
from specdec.core.errors import UserError

SCRIPT = "benchmarks/drafters_plots.py"
NOTHING = "Nothing has been measured yet."
PICTURE = "drafters.svg"
TREES = "trees"
"""The part of the page about trees."""
_MOST_NAMED = 3
"""Cells of a kind of processor, in one place, that are named one by one."""


def draw(cells: Sequence[Cell]) -> Any:
    """Speedup by family and batch size, measured against possible, and acceptance by position."""
    figure, (bars, both, reached) = new_figure(3)
    figure.set_size_inches(13.5, 5.0)
    target = costliest(cells)
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


def kinds_of_machines(cells: Sequence[Cell]) -> str:
    """Say which cells were measured on processors of which kind; empty: all on one, or it is not known."""
    kinds = [one["measured"].get("cpu_capability", "") for one in cells]
    if len(set(kinds)) < 2:
        return ""
    places: dict[tuple[str, int], list[Cell]] = {}
    for one in cells:
        places.setdefault((one["cell"]["target"], one["cell"]["batch"]), []).append(one)
    each = [f"{target}, batch {batch}: {_by_kind(own)}" for (target, batch), own in places.items()]
    return (
        "Measured on more than one kind of processor (told apart by the instructions that PyTorch finds): "
        f"{'; '.join(each)}. Neither tokens/s nor ratios of one kind can be compared with those of another."
    )


def _by_kind(cells: Sequence[Cell]) -> str:
    """Count the cells of a place by kind, the most frequent first; a few are named."""
    named: dict[str, list[str]] = {}
    for one in cells:
        name = f"`{one['cell']['family']}` at temperature {one['cell']['temperature']:g}"
        named.setdefault(one["measured"].get("cpu_capability", ""), []).append(name)
    kinds = sorted(named, key=lambda kind: -len(named[kind]))
    if len(kinds) == 1:
        return f"{kinds[0]}, all {len(cells)} cells"
    return ", ".join(
        f"{kind} {len(named[kind])} of {len(cells)}"
        + (f" ({', '.join(named[kind])})" if len(named[kind]) <= _MOST_NAMED else "")
        for kind in kinds
    )


def page_of(page: str, results: Mapping[str, Any] | None, picture: str) -> str:
    """Return the page with its tables; without results, claims alone, and that nothing was measured.

    Raises:
        UserError: the page has no place for them.
    """
    text = NOTHING
    if results is not None:
        parts = (kinds_of_machines(results["cells"]), measured(results, picture))
        text = "\n\n".join(part for part in parts if part)
    page = put_into(page, "measured", SCRIPT, text)
    claims = published([] if results is None else results["cells"])
    return put_into(page, "published", SCRIPT, claims)


def main(
    results: Annotated[Path, typer.Argument(help="What benchmarks.drafters has written.")],
    folder: Annotated[Path, typer.Argument(help="Where to put the picture.")],
    page: Annotated[Path | None, typer.Option(help="Page whose tables are written anew.")] = None,
    trees_page: Annotated[
        Path | None, typer.Option("--trees", help="Page that has trees beside chains.")
    ] = None,
) -> None:
    """Draw drafters.svg, and write the tables into pages.

    Example: python -m benchmarks.drafters_plots benchmarks/results/drafters.json docs/images
    """
    read = json.loads(results.read_text())
    try:
        prepare_figures()
        save_figure(draw(read["cells"]), folder / PICTURE)
        if page is not None:
            picture = Path(os.path.relpath(folder / PICTURE, page.parent)).as_posix()
            page.write_text(page_of(page.read_text(), read, picture))
        if trees_page is not None:
            trees_page.write_text(put_into(trees_page.read_text(), TREES, SCRIPT, trees(read["cells"])))
    except UserError as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}")
        raise typer.Exit(2) from error


if __name__ == "__main__":
    typer.run(main)
