"""Sparse-K/V drafts where contexts are long, as tables for docs/performance.md, from the raw results.

python -m benchmarks.long_context_tables docs/performance.md benchmarks/results/long-context.json \
    --images docs/images    # cells of further results instead of those of the ones before them
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import long_context_plots
from benchmarks.long_context_engines import Drafter
from benchmarks.pages import cells_and_origins, disturbed_cells, put_into, table
from benchmarks.turns import LIMIT

PART, SCRIPT = "long contexts", "benchmarks/long_context_tables.py"
_AIMS = {"gqa": 1.5, "mha": 2.0}
"""Speedups that were aimed at with the largest batch and the longest context, by heads."""

Result = Mapping[str, Any]
Cells = Sequence[Result]


def newest(results: Sequence[Result]) -> list[Result]:
    """Return of each cell what the last result has of it, and where that was measured."""
    cells: dict[str, Result] = {}
    for result in results:
        for cell in result["cells"]:
            # Whether the controller ran beside it does not make it another situation.
            key = {**cell["cell"], "with_controller": None}
            cells[json.dumps(key, sort_keys=True)] = {"measured": result["environment"], **cell}
    return list(cells.values())


def tables(results: Sequence[Result]) -> str:
    """Return all of them, in Markdown."""
    cells = newest(results)
    groups: dict[str, list[Result]] = {}
    for cell in cells:
        groups.setdefault(_name(cell), []).append(cell)
    grids = {name: own for name, own in groups.items() if len({_batch(cell) for cell in own}) > 1}
    others = {name: own for name, own in groups.items() if name not in grids}
    parts = [
        cells_and_origins(cells),
        "Tokens per second over plain decoding: with the best fixed k; under the goodput controller. In bold "
        f"what is below {LIMIT} with 95 % confidence:",
        *(_grid(name, own, _over_plain) for name, own in grids.items()),
        "At how many of these batches the best fixed k is above plain decoding; in brackets, at how many "
        "with 95 % confidence:",
        _gains(grids),
        "The same cells with the best fixed k over ordinary speculation, a draft model that attends to "
        "everything with its own best k; the share of a step of plain decoding that is reading K/V; and how "
        "often a draft token is accepted:",
        *(_grid(name, own, _beside) for name, own in grids.items()),
    ]
    if others:
        largest = max(map(_batch, cells))
        parts += [
            f"Batch {largest}, other drafters, best fixed k: over plain decoding; over ordinary speculation:",
            _others(others),
        ]
    return "\n\n".join([*parts, _in_short(cells)])


def _name(cell: Result) -> str:
    situation = cell["cell"]
    greedy = "" if situation["temperature"] else ", greedy"
    return f"{situation['heads']}, {Drafter(**situation['drafter']).name}{greedy}"


def _batch(cell: Result) -> int:
    return int(cell["cell"]["batch"])


def _context(cell: Result) -> int:
    return int(cell["cell"]["context"])


def _grid(name: str, cells: Cells, text_of: Callable[[Result], str]) -> str:
    by_shape = {(_batch(cell), _context(cell)): text_of(cell) for cell in cells}
    batches, contexts = (sorted(set(its)) for its in zip(*by_shape, strict=True))
    rows = [(batch, *(by_shape.get((batch, context), "") for context in contexts)) for batch in batches]
    return table((f"{name}: batch", f"{contexts[0]} cached tokens", *contexts[1:]), rows)


def _over_plain(cell: Result) -> str:
    ratios = [cell[name] for name in ("vs_plain", "controller_vs_plain") if name in cell]
    return "; ".join(map(_marked, ratios))


def _marked(ratio: Result) -> str:
    median = f"{ratio['median']:.2f}"
    return f"**{median}**" if ratio["upper"] < LIMIT else median


def _beside(cell: Result) -> str:
    numbers = (cell["vs_ordinary"]["median"], cell["kv_share_of_plain"], cell["acceptance"])
    return "; ".join(f"{number:.2f}" for number in numbers)


def _others(groups: Mapping[str, Cells]) -> str:
    contexts = sorted({_context(cell) for own in groups.values() for cell in own})
    longest = contexts[-1]
    head = (
        "target, drafter",
        *(f"{context} cached tokens" for context in contexts),
        f"k at {longest}",
        f"accepted at {longest}",
        f"of what its parts allow at {longest}",
    )
    rows = []
    for name, own in groups.items():
        by_context = {_context(cell): cell for cell in own}
        ratios = [_two_ratios(by_context[one]) if one in by_context else "" for one in contexts]
        last = by_context.get(longest)
        more = ("", "", "") if last is None else (last["k"], *_of_parts(last))
        rows.append((name, *ratios, *more))
    return table(head, rows)


def _two_ratios(cell: Result) -> str:
    return f"{_marked(cell['vs_plain'])}; {cell['vs_ordinary']['median']:.2f}"


def _of_parts(cell: Result) -> tuple[str, str]:
    return f"{cell['acceptance']:.2f}", f"{cell['share_of_predicted']['median']:.2f}"


def _in_short(cells: Cells) -> str:
    lines = [_corner(cells), _controlled(cells), *_reading(cells)]
    shares = [cell["share_of_predicted"]["median"] for cell in cells]
    lines.append(f"Measured speedups are {_range(shares)} of what acceptance and the parts allow.")
    disturbed = disturbed_cells(cells)
    return "\n".join(f"- {line}" for line in (*lines, disturbed) if line)


def _gains(grids: Mapping[str, Cells]) -> str:
    """At how many of the batches the best fixed k gains."""
    contexts = sorted({_context(cell) for own in grids.values() for cell in own})
    rows = []
    for name, own in grids.items():
        by_context = ([cell["vs_plain"] for cell in own if _context(cell) == one] for one in contexts)
        rows.append((name, *map(_number_above, by_context)))
    return table(("target, drafter", f"{contexts[0]} cached tokens", *map(str, contexts[1:])), rows)


def _number_above(ratios: Sequence[Result]) -> str:
    above, certain = (sum(ratio[name] > 1.0 for ratio in ratios) for name in ("median", "lower"))
    return f"{above} ({certain}) of {len(ratios)}" if ratios else ""


def _corner(cells: Cells) -> str:
    """Say what the drafter of all batches comes to where most was aimed at."""
    batch, context = max(map(_batch, cells)), max(map(_context, cells))
    drafter = cells[0]["cell"]["drafter"]
    found = []
    for heads, aim in _AIMS.items():
        wanted = {"heads": heads, "drafter": drafter, "batch": batch, "context": context}
        for cell in cells:
            if cell["cell"]["temperature"] and wanted.items() <= cell["cell"].items():
                ratio = cell["vs_plain"]
                bounds = f"{ratio['lower']:.2f} to {ratio['upper']:.2f}"
                found.append(f"{heads} {ratio['median']:.2f} ({bounds}; the aim was {aim:g})")
    return f"At {batch} x {context}, {Drafter(**drafter).name}: {', '.join(found)}." if found else ""


def _controlled(cells: Cells) -> str:
    own = [cell for cell in cells if "controller_vs_plain" in cell]
    slower = [cell for cell in own if cell["controller_vs_plain"]["upper"] < LIMIT]
    named = "; ".join(
        f"{_name(cell)}, {_batch(cell)} x {_context(cell)}: {cell['controller_vs_plain']['median']:.2f}, at "
        f"most {cell['controller_vs_plain']['upper']:.3f}"
        for cell in slower
    )
    exceptions = f"; those that are: {named}" if slower else ""
    return (
        f"The controller: {len(own) - len(slower)} of {len(own)} cells are not below {LIMIT} of plain "
        f"decoding with 95 % confidence{exceptions}."
        if own
        else ""
    )


def _reading(cells: Cells) -> list[str]:
    """Say what reading K/V takes and how fast it is: where there is much of it, and elsewhere."""
    batch, context = max(map(_batch, cells)), max(map(_context, cells))
    much = [cell for cell in cells if _batch(cell) == batch or _context(cell) == context]
    few = [cell for cell in cells if cell not in much]
    lines = []
    for where, own in ((f"batch {batch} or {context} cached tokens", much), ("all other cells", few)):
        if not own:
            continue
        shares = [cell["kernel_bytes_per_s"] / cell["stream_bytes_per_s"] for cell in own]
        gb_per_s = [cell["kernel_bytes_per_s"] / 1e9 for cell in own]
        stream = [cell["stream_bytes_per_s"] / 1e9 for cell in own]
        lines.append(
            f"Reading K/V, {where} ({len(own)} cells): "
            f"{_range([cell['kv_share_of_plain'] for cell in own])} of a step of plain decoding, at "
            f"{_range(gb_per_s, 1)} GB/s: {_range(shares)} of what one stream of reads by the same threads "
            f"has, {_range(stream, 1)} GB/s."
        )
    return lines


def _range(values: Sequence[float], digits: int = 2) -> str:
    middle = statistics.median(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f} (middle {middle:.{digits}f})"


def main(
    page: Annotated[Path, typer.Argument(help="Page whose tables are exchanged.")],
    results: Annotated[list[Path], typer.Argument(help="What benchmarks.long_context has written.")],
    images: Annotated[Path | None, typer.Option(help="Folder for the picture of the same cells.")] = None,
) -> None:
    """Write the tables of long contexts into a page, and draw their picture.

    Example: python -m benchmarks.long_context_tables docs/performance.md benchmarks/results/long-context.json
    """
    read = [json.loads(one.read_text()) for one in results]
    page.write_text(put_into(page.read_text(), PART, SCRIPT, tables(read)))
    if images is not None:
        long_context_plots.save(newest(read), images)


if __name__ == "__main__":
    typer.run(main)
