"""That the page says of GPUs what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.gpu_tables import PART, SCRIPT, main, text
from benchmarks.pages import begin_of, end_of, put_into

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
NAMES = ("gpu-decode", "gpu-decode-before", "gpu-attention", "gpu-long-context")


def results() -> list[dict[str, Any]]:
    return [json.loads((RESULTS / f"{name}.json").read_text()) for name in NAMES]


def test_the_page_says_what_was_measured() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert put_into(page, PART, SCRIPT, text(*results())) == page


def test_every_cell_has_a_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"above\n{begin_of(PART, SCRIPT)}\nold\n{end_of(PART)}\nbelow\n")
    main(page, RESULTS)
    written = page.read_text()
    assert written.startswith("above\n")
    assert written.endswith("below\n")
    assert "old" not in written
    decode, before, attention, long_context = results()
    num_cells = sum(len(decode[name]) for name in ("steps", "drafts", "choices"))
    num_cells += len(attention["cells"]) + len(long_context["cells"])
    assert sum(line.startswith("| ") for line in written.splitlines()) == num_cells + 5
    first = decode["steps"][0]
    old = next(cell for cell in before["steps"] if cell["context"] == first["context"])
    assert (
        f"| {first['ms']['step']:.1f} ({first['step_times_floor']:.2f}) | {old['ms']['step']:.1f} |"
        in written
    )


def test_measured_is_what_is_committed() -> None:
    for one in results():
        assert one["environment"]["uncommitted_changes"] is False
        assert one["device"]["name"] == "NVIDIA H200"


def test_what_headlines_leave_out_is_said() -> None:
    """Cells of fewer layers, and what of the published figures has none."""
    *others, long_context = results()
    written = text(*others, long_context)
    assert "that of all cells is 0.77 (64 x 32768, 14 layers, budget 512)." in written
    assert "Not compared, for too few layers fit beside its K/V: 128 x 32768." in written
    published = [[32, 32768], [64, 32768]]
    without = {**long_context, "plan": {**long_context["plan"], "published": published}}
    assert "Not compared" not in text(*others, without)
