"""What was measured on a GPU, as tables for the pages.

python -m benchmarks.gpu_tables docs/performance.md benchmarks/results
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.pages import origin_of, put_into, table

PART, SCRIPT = "gpu", "benchmarks/gpu_tables.py"

Result = Mapping[str, Any]


def text(decode: Result, before: Result, attention: Result, long_context: Result) -> str:
    """Return all tables in Markdown; `before` is `decode` of a time when less was done."""
    return "\n\n".join(
        [
            _origins(decode, attention, long_context),
            "### Steps of an 8 B Llama",
            _steps(decode, before),
            "### Draft loops of a 1 B Llama, and choosing tokens",
            _drafts(decode["drafts"]),
            _choices(decode["choices"]),
            "### One layer's attention",
            _attention(attention["cells"]),
            "### Self-speculation over long contexts",
            _long_context(long_context),
        ]
    )


def _origins(*results: Result) -> str:
    origins = dict.fromkeys(origin_of(one["environment"], with_processor=False) for one in results)
    device, environment = results[0]["device"], results[0]["environment"]
    speeds = sorted({f"{one['headlines']['gpu_bandwidth_tb_s']:.2f}" for one in results[:2]})
    return (
        f"Measured {'; '.join(origins)}: one {device['name']} ({device['memory_bytes'] / 2**30:.0f} GiB, "
        f"CUDA {device['cuda']}), PyTorch {environment['torch']}, "
        f"transformers {environment['transformers']}, Triton {device['triton']}. "
        f"It reads {' to '.join(speeds)} TB/s."
    )


def _steps(decode: Result, before: Result) -> str:
    earlier = {_shape(cell): cell["ms"] for cell in before["steps"]}
    head = (
        "batch x context",
        "rows",
        "floor",
        "device (of floor)",
        "step (of floor)",
        "step, at first",
        "eager",
    )
    lines = []
    for cell in decode["steps"]:
        ms = cell["ms"]
        old = earlier.get(_shape(cell), {})
        lines.append(
            (
                f"{cell['batch']} x {cell['context']}",
                cell["rows"],
                f"{ms['floor']:.1f}",
                f"{ms['device']:.1f} ({cell['device_times_floor']:.2f})",
                f"{ms['step']:.1f} ({cell['step_times_floor']:.2f})",
                f"{old['step']:.1f}" if old else "",
                f"{ms['eager']:.1f}" if "eager" in ms else "",
            )
        )
    said = (
        "Milliseconds. Rows: 1 decodes, 5 verify four drafts. Device: the recorded graph by the device's "
        "clock; step: from slices to token ids, greedily, by the host's. The floor is weights and K/V over "
        "the bandwidth, and counts no products: with hundreds of rows it is these that take the time. "
        "At first: the same on "
        f"{origin_of(before['environment'], with_processor=False)}."
    )
    return f"{said}\n\n{table(head, lines)}"


def _shape(cell: Result) -> tuple[int, int, int]:
    return cell["batch"], cell["context"], cell["rows"]


def _drafts(cells: Sequence[Result]) -> str:
    head = ("batch x context", "k", "floor, ms", "loop, ms", "times the floor")
    lines = [
        (
            f"{cell['batch']} x {cell['context']}",
            cell["k"],
            f"{cell['ms']['floor']:.1f}",
            f"{cell['ms']['loop']:.1f}",
            f"{cell['times_floor']:.2f}",
        )
        for cell in cells
    ]
    return table(head, lines)


def _choices(cells: Sequence[Result]) -> str:
    head = ("rows of logits", "read once, ms", "greedy", "temperature", "temperature and top-p")
    lines = [
        (cell["rows"], *(f"{cell['ms'][name]:.2f}" for name in ("floor", "greedy", "sampled", "cut")))
        for cell in cells
    ]
    return f"The token function, on {cells[0]['vocab_size']} tokens:\n\n{table(head, lines)}"


def _attention(cells: Sequence[Result]) -> str:
    splits = [name for name in cells[0]["us"] if name.startswith("split_")]
    head = (
        "batch x context", "rows", "floor", "ours (of floor)", "PyTorch, contiguous",
        *(f"splits of {name.removeprefix('split_')}" for name in splits),
    )  # fmt: skip
    lines = [
        (
            f"{cell['batch']} x {cell['context']}",
            cell["rows"],
            f"{cell['floor_us']:.0f}",
            f"{cell['us']['ours']:.0f} ({cell['times_floor']:.2f})",
            f"{cell['us']['torch_sdpa_dense']:.0f}",
            *(f"{cell['us'][name]:.0f}" for name in splits),
        )
        for cell in cells
    ]
    return f"Microseconds, with nothing in the L2 cache; all launches of a layer.\n\n{table(head, lines)}"


def _long_context(result: Result) -> str:
    head = (
        "batch x context", "layers", "budget", "plain round, ms (of roofline)", "best k", "round, ms",
        "speedup", "of the bound",
    )  # fmt: skip
    lines = []
    for cell in result["cells"]:
        k = str(cell["k"])
        lines.append(
            (
                f"{cell['batch']} x {cell['context']}",
                cell["num_layers"],
                cell["budget"],
                f"{cell['ms']['0']:.1f} ({cell['plain_times_roofline']:.2f})",
                k,
                f"{cell['ms'][k]:.1f}",
                f"{cell['speedup']:.2f}",
                f"{cell['share_of_bound']:.2f}",
            )
        )
    return f"{_compared(result)}\n\n{table(head, lines)}"


def _compared(result: Result) -> str:
    """Say what comes of the cells: with which of them, and without which published ones."""
    cells, numbers = result["cells"], result["headlines"]
    least = min(cells, key=lambda cell: float(cell["share_of_bound"]))
    there = {(cell["batch"], cell["context"]) for cell in cells}
    published = [tuple(shape) for shape in result["plan"]["published"]]
    absent = [f"{batch} x {context}" for batch, context in published if (batch, context) not in there]
    said = (
        "Whole rounds, of which each draft token is taken to stand with probability "
        f"{result['plan']['acceptance']}. The least share of the bound, with the whole model and the better "
        f"budget of a batch, is {numbers['gpu_long_share_of_bound']:.2f}; that of all cells is "
        f"{least['share_of_bound']:.2f} ({least['batch']} x {least['context']}, {least['num_layers']} "
        f"layers, budget {least['budget']}). Of MagicDec's published batches that fit with fewer layers, the "
        f"speedup is at least {numbers['gpu_long_over_published']:.2f} times the published one."
    )
    if absent:
        said += f" Not compared, for too few layers fit beside its K/V: {', '.join(absent)}."
    return said


def main(
    page: Annotated[Path, typer.Argument(help="Page whose tables are exchanged.")],
    results: Annotated[Path, typer.Argument(help="Folder of what benchmarks.gpu_* have written.")],
) -> None:
    """Write the tables of GPUs into a page.

    Example: python -m benchmarks.gpu_tables docs/performance.md benchmarks/results
    """
    names = ("gpu-decode", "gpu-decode-before", "gpu-attention", "gpu-long-context")
    read = [json.loads((results / f"{name}.json").read_text()) for name in names]
    page.write_text(put_into(page.read_text(), PART, SCRIPT, text(*read)))


if __name__ == "__main__":
    typer.run(main)
