"""Parts of pages that scripts write from raw results, between two comments that say which script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.stolen import MOST_STOLEN
from specdec.core.errors import UserError


def begin_of(part: str, script: str) -> str:
    """Return the line above a part that a script writes."""
    return f"<!-- {part}: written by {script} -->"


def end_of(part: str) -> str:
    """Return the line below it."""
    return f"<!-- {part}: end -->"


def put_into(page: str, part: str, script: str, text: str) -> str:
    """Return a page with what stands between the lines of a part exchanged.

    Raises:
        UserError: the page has no place for it.
    """
    first, last = begin_of(part, script), end_of(part)
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise UserError(f"the page needs a line {first} and behind it a line {last}")
    return f"{before}{first}\n\n{text}\n\n{last}{after}"


def origin_of(environment: Mapping[str, Any], *, with_processor: bool = True) -> str:
    """Say when, at which commit and on what something was measured."""
    commit = f"commit {environment['commit'][:7]}"
    if environment["uncommitted_changes"]:
        commit = f"{commit} with changes that were not committed"
    machine = f", {environment['processor']}" if with_processor else ""
    return f"{environment['date'][:10]} at {commit}{machine}"


def origins_of(environments: Iterable[Mapping[str, Any]]) -> str:
    """Say the same of what was measured in several parts."""
    return "; ".join(dict.fromkeys(map(origin_of, environments)))


def cells_and_origins(cells: Iterable[Mapping[str, Any]]) -> str:
    """Say when and where cells were `measured`: a run may have been cut, and gone on with."""
    origins = Counter(origin_of(cell["measured"]) for cell in cells)
    each = "; ".join(
        f"{number} {'cell' if number == 1 else 'cells'} on {origin}" for origin, number in origins.items()
    )
    return f"Measured: {each}."


def disturbed_cells(cells: Iterable[Mapping[str, Any]]) -> str:
    """Say how many cells others on the same host disturbed; empty: it was not looked at."""
    stolen = [cell["most_stolen"] for cell in cells if "most_stolen" in cell]
    if not stolen:
        return ""
    disturbed = sum(share > MOST_STOLEN for share in stolen)
    return (
        f"In {disturbed} cells others on the same host had more than {100 * MOST_STOLEN:.0f} % of our cores "
        "in some turn, however often it was taken again."
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])
