"""Pictures of what sparse-K/V drafts bring, from the raw results.

python -m benchmarks.long_context_plots benchmarks/results/long-context.json docs/images
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.figures import new_figure, prepare_figures, save_figure

Cells = Sequence[Mapping[str, Any]]


def draw(cells: Cells) -> Any:
    """Speedup over the batch by context, over the context by drafter, and measured against predicted."""
    figure, (by_batch, by_context, both) = new_figure(3)
    sampled = [cell for cell in cells if cell["cell"]["temperature"] > 0.0]
    first = _name(sampled[0])
    own = [cell for cell in sampled if _name(cell) == first]
    for number, context in enumerate(sorted({cell["cell"]["context"] for cell in own})):
        _line(
            by_batch, [one for one in own if one["cell"]["context"] == context], "batch", number, f"{context}"
        )
    by_batch.set(xlabel=f"batch ({first}); dotted: the controller", ylabel="tokens/s against plain")
    by_batch.legend(frameon=False, title="cached tokens", fontsize=7, title_fontsize=7)
    largest = max(cell["cell"]["batch"] for cell in sampled)
    wide = [cell for cell in sampled if cell["cell"]["batch"] == largest]
    for number, name in enumerate(dict.fromkeys(_name(cell) for cell in wide)):
        _line(by_context, [cell for cell in wide if _name(cell) == name], "context", number, name)
    by_context.set(xscale="log", xlabel=f"cached tokens, batch {largest}")
    by_context.legend(frameon=False, fontsize=5)
    for axis in (by_batch, by_context):
        axis.axhline(1.0, color="0.5", lw=0.8)
        axis.set(ylim=(0, None))
    for number, heads in enumerate(dict.fromkeys(cell["cell"]["heads"] for cell in sampled)):
        points = [
            (cell["predicted"]["median"], cell["vs_plain"]["median"])
            for cell in sampled
            if cell["cell"]["heads"] == heads
        ]
        both.plot(*zip(*points, strict=True), "o", color=f"C{number}", label=heads)
    most = max(cell["predicted"]["median"] for cell in sampled)
    both.plot([0, most], [0, most], color="0.5", lw=0.8)
    both.set(xlabel="predicted from the parts", ylabel="measured", xlim=(0, None), ylim=(0, None))
    both.legend(frameon=False)
    return figure


def _name(cell: Mapping[str, Any]) -> str:
    drafter = cell["cell"]["drafter"]
    budget = "" if drafter["policy"] == "full" else f" {drafter['budget']}"
    return f"{cell['cell']['heads']}, {drafter['method']}, {drafter['policy']}{budget}"


def _line(axis: Any, cells: Cells, over: str, number: int, label: str) -> None:
    """Draw the best k, and dotted the controller."""
    ordered = sorted(cells, key=lambda cell: cell["cell"][over])
    for ratio, line, name in (("vs_plain", "o-", label), ("controller_vs_plain", ":", None)):
        points = [(cell["cell"][over], cell[ratio]["median"]) for cell in ordered if ratio in cell]
        if points:
            axis.plot(*zip(*points, strict=True), line, color=f"C{number % 10}", label=name)


def save(cells: Cells, folder: Path) -> None:
    """Draw long-context.svg into a folder."""
    prepare_figures()
    save_figure(draw(cells), folder / "long-context.svg")


def main(
    results: Annotated[Path, typer.Argument(help="What benchmarks.long_context has written.")],
    folder: Annotated[Path, typer.Argument(help="Where to put the picture.")],
) -> None:
    """Draw docs/images/long-context.svg.

    Example: python -m benchmarks.long_context_plots benchmarks/results/long-context.json docs/images
    """
    save(json.loads(results.read_text())["cells"], folder)


if __name__ == "__main__":
    typer.run(main)
