"""Write the table of models/demo/heads/README.md: `.venv/bin/python scripts/demo_heads_table.py`.

Everything in it is what `drafthouse train` has left in the folders of the heads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.pages import put_into, table

HEADS = Path(__file__).resolve().parent.parent / "models" / "demo" / "heads"
SCRIPT = "scripts/demo_heads_table.py"
PART = "heads"
_EVALUATION = "acceptance.json"


def table_of(heads: Path) -> str:
    """Return the table of all finished heads of a folder, in Markdown."""
    rows = [_row(folder) for folder in sorted(heads.iterdir()) if (folder / _EVALUATION).exists()]
    return table(("folder", "method", "parameters", "MB", "tokens read", "minutes", *_columns()), rows)


def with_table(page: str, heads: Path) -> str:
    """Return the page with its table written anew."""
    return put_into(page, PART, SCRIPT, table_of(heads))


def _columns() -> Iterator[str]:
    for temperature in ("0", "0.7"):
        yield f"tokens per round at {temperature}"
        yield f"draft token 1 / 2 / ... stands at {temperature}"


def _row(folder: Path) -> tuple[str, ...]:
    found: Mapping[str, Any] = json.loads((folder / _EVALUATION).read_text())
    num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    acceptance = [found["acceptance"][temperature] for temperature in ("0.0", "0.7")]
    return (
        f"`{folder.name}`",
        f"`{found['recipe']['method']}`",
        f"{found['parameters'] / 1e6:.2f} M",
        f"{num_bytes / 1e6:.1f}",
        f"{found['trained_tokens'] / 1e6:.1f} M",
        f"{found['elapsed_s'] / 60:.0f}",
        *(column for one in acceptance for column in _accepted(one)),
    )


def _accepted(one: Mapping[str, Any]) -> tuple[str, str]:
    reached = " / ".join(f"{share:.2f}" for share in one["reached"])
    return f"k = {one['k']}: {one['tokens_per_round']:.2f}", reached


def main() -> None:
    """Write it."""
    page = HEADS / "README.md"
    page.write_text(with_table(page.read_text(), HEADS))


if __name__ == "__main__":
    main()
