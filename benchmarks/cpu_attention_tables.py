"""The paged attention of CPUs against what the machine reads and multiplies, as a table for the pages.

python -m benchmarks.cpu_attention_tables docs/performance.md benchmarks/results/cpu-attention.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.pages import origin_of, put_into, table

PART, SCRIPT = "attention kernel", "benchmarks/cpu_attention_tables.py"
NOT_YET = (
    "Not measured yet: `python -m benchmarks.cpu_attention --json benchmarks/results/cpu-attention.json`."
)

Result = Mapping[str, Any]


def tables(result: Result | None) -> str:
    """Return the table and what it comes to, in Markdown; None: there are no results."""
    if result is None:
        return NOT_YET
    cells: Sequence[Result] = result["cells"]
    return "\n\n".join([_machine(result), _rates(cells), _in_short(cells)])


def _machine(result: Result) -> str:
    machine = result["machine"]
    products = ", ".join(
        f"{name} {machine[f'product_{name}_operations_per_s'] / 1e9:.0f}" for name in ("fp32", "bf16")
    )
    environment = result["environment"]
    return (
        f"Measured on {origin_of(environment)}, {environment['num_threads']} threads. The machine: one "
        f"stream of reads {machine['stream_bytes_per_s'] / 1e9:.1f} GB/s, products of large matrices "
        f"{products} GFLOP/s; shares are of the stream and of the faster product. Of each cell: GB/s "
        "(share), GFLOP/s (share), share of what the worse of the two bounds allows."
    )


def _rates(cells: Sequence[Result]) -> str:
    rows_of = sorted({one["cell"]["rows"] for one in cells})
    by_shape: dict[tuple[str, str, int, int], dict[int, str]] = {}
    for one in cells:
        cell = one["cell"]
        shape = (cell["heads"], cell["dtype"], cell["batch"], cell["context"])
        by_shape.setdefault(shape, {})[cell["rows"]] = _rate(one)
    head = ("heads", "numbers", "batch x context", *(_rows(number) for number in rows_of))
    return table(
        head,
        (
            (heads, dtype, f"{batch} x {context}", *(its.get(number, "") for number in rows_of))
            for (heads, dtype, batch, context), its in by_shape.items()
        ),
    )


def _rows(number: int) -> str:
    return f"{number} {'row' if number == 1 else 'rows'} of each sequence"


def _rate(one: Result) -> str:
    return (
        f"{one['bytes_per_s'] / 1e9:.1f} ({one['share_of_stream']:.2f}), "
        f"{one['operations_per_s'] / 1e9:.1f} ({one['share_of_product']:.2f}), {one['share_of_bound']:.2f}"
    )


def _in_short(cells: Sequence[Result]) -> str:
    lines = []
    for heads, dtype in dict.fromkeys((one["cell"]["heads"], one["cell"]["dtype"]) for one in cells):
        own = [one for one in cells if (one["cell"]["heads"], one["cell"]["dtype"]) == (heads, dtype)]
        batch, context = max((one["cell"]["batch"], one["cell"]["context"]) for one in own)
        seconds = {
            one["cell"]["rows"]: one["layer_s"]["ours"]["median"]
            for one in own
            if (one["cell"]["batch"], one["cell"]["context"]) == (batch, context)
        }
        least, most = min(seconds), max(seconds)
        lines.append(
            f"- {heads}, {dtype}, {batch} x {context}: {_rows(most)} take "
            f"{seconds[most] / seconds[least]:.2f} times as long as {least}."
        )
    faster = [one["times_faster_than_portable"] for one in cells]
    lines.append(f"- The portable attention takes {min(faster):.1f} to {max(faster):.1f} times as long.")
    return "\n".join(lines)


def main(
    page: Annotated[Path, typer.Argument(help="Page whose table is exchanged.")],
    results: Annotated[Path, typer.Argument(help="What benchmarks.cpu_attention has written.")],
) -> None:
    """Write the table of the attention kernel into a page.

    Example: python -m benchmarks.cpu_attention_tables docs/performance.md runs/cpu-attention.json
    """
    text = tables(json.loads(results.read_text()))
    page.write_text(put_into(page.read_text(), PART, SCRIPT, text))


if __name__ == "__main__":
    typer.run(main)
