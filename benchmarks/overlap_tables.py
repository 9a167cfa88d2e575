"""What overlapping the groups brings, as tables for docs/performance.md, from the raw results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pages import origins_of, table

SCRIPT = "benchmarks/overlap_plots.py"
"""Writes them into the page."""
_ABOUT_EQUAL = 1.35
"""T_draft is about T_verify if neither is longer than the other by more than this factor."""
_MOSTLY_ACCEPTED = 0.95
_QUOTED_BATCH = 16

Result = Mapping[str, Any]


def quoted_draft(drafts: Sequence[Result]) -> Result:
    """Return the results with the draft model whose T_draft is nearest to T_verify at batch 16.

    At batch 16 and not 1: two cores that compute do so side by side, but two that wait for weights wait for
    the same memory.
    """

    def distance(draft: Result) -> float:
        hits = next(one for one in draft["on_hits"] if one["batch"] == _QUOTED_BATCH)
        return abs(1.0 - float(hits["draft_over_verify"]))

    return min(drafts, key=distance)


def tables(results: Result) -> str:
    """Return all of them, in Markdown."""
    drafts: Sequence[Result] = results["drafts"]
    quoted = quoted_draft(drafts)
    parts = [
        f"Measured on {origins_of(_environments(results))}.",
        "A round against its parts, where everything is accepted and every prediction right; ms:",
        _rounds(drafts),
        f"Tokens per second with the draft model of {_size(quoted)}:",
        _modes(quoted),
        f"draft_ahead where T_draft and T_verify are within a factor of {_ABOUT_EQUAL} of each other:",
        _equal_costs(drafts),
        "What is neither drafting nor verifying, ms per round:",
        _coordinator(drafts),
    ]
    return "\n\n".join(parts)


def _environments(results: Result) -> Sequence[Result]:
    """Return where its parts were measured: a run may have been cut, and gone on with."""
    drafts = results["drafts"]
    cells = [cell for draft in drafts for cell in (*draft["on_hits"], *draft["cells"])]
    coordinators = [one for draft in drafts for one in draft.get("coordinator_measured", [])]
    return [*coordinators, *(cell.get("measured", results["environment"]) for cell in cells)]


def _rounds(drafts: Sequence[Result]) -> str:
    head = (
        "draft model",
        "batch",
        "T_draft / T_verify",
        "alone",
        "both running",
        "lockstep round",
        "draft_ahead round",
        "over the larger, both running",
    )
    rows = []
    for draft in drafts:
        for hits in draft["on_hits"]:
            alone, both = hits["bare_lockstep_ms"]["alone"], hits["bare_ms"]["overlapped"]
            rows.append(
                (
                    _size(draft),
                    hits["batch"],
                    f"{hits['draft_over_verify']:.2f}",
                    f"{alone['draft']:.1f} / {alone['target']:.1f}",
                    f"{both['draft']:.1f} / {both['target']:.1f}",
                    f"{hits['lockstep_round_ms']['median']:.1f}",
                    f"{hits['round_ms']['median']:.1f}",
                    f"{hits['round_over_max']:.2f}",
                )
            )
    return table(head, rows)


def _modes(draft: Result) -> str:
    head = (
        "batch",
        "acceptance",
        "temperature",
        "lockstep / plain",
        "ping_pong / plain",
        "draft_ahead / plain",
        "ping_pong / lockstep",
        "draft_ahead / lockstep",
        "best mode / colocated",
    )
    rows = []
    for one in draft["cells"]:
        cell, plain, lockstep = one["cell"], one["vs_plain"], one["vs_lockstep"]
        rows.append(
            (
                cell["batch"],
                cell["acceptance"],
                f"{cell['temperature']:g}",
                *(f"{plain[mode]['median']:.2f}" for mode in ("lockstep", "ping_pong", "draft_ahead")),
                _spread(lockstep["ping_pong"]),
                _spread(lockstep["draft_ahead"]),
                f"{one['vs_colocated']['median']:.2f}",
            )
        )
    return table(head, sorted(rows))


def _equal_costs(drafts: Sequence[Result]) -> str:
    """Name the cells that the aim of 1.4 times lockstep is about, those that miss it included."""
    head = (
        "draft model",
        "batch",
        "T_draft / T_verify",
        "T_draft and T_verify both running, over alone",
        "every guess right, over lockstep",
        f"acceptance {_MOSTLY_ACCEPTED}, over lockstep",
    )
    rows = []
    for draft in drafts:
        for hits in draft["on_hits"]:
            ratio = hits["draft_over_verify"]
            if not 1.0 / _ABOUT_EQUAL <= ratio <= _ABOUT_EQUAL:
                continue
            alone, both = hits["bare_ms"]["alone"], hits["bare_ms"]["overlapped"]
            slower = " and ".join(f"{both[role] / alone[role]:.2f}" for role in ("draft", "target"))
            best = hits["lockstep_round_ms"]["median"] / hits["round_ms"]["median"]
            rows.append(
                (_size(draft), hits["batch"], f"{ratio:.2f}", slower, f"{best:.2f}", _accepted(draft, hits))
            )
    return table(head, rows)


def _accepted(draft: Result, hits: Result) -> str:
    wanted = {"batch": hits["batch"], "temperature": 0.0, "acceptance": _MOSTLY_ACCEPTED}
    cell = next(one for one in draft["cells"] if one["cell"] == wanted)
    return _spread(cell["vs_lockstep"]["draft_ahead"])


def _coordinator(drafts: Sequence[Result]) -> str:
    """By controller: the one that does as it is told, and the one that is the default."""
    kinds = {"coordinator_ms": "fixed k", "coordinator_goodput_ms": "goodput controller"}
    measured = {key: name for key, name in kinds.items() if key in drafts[0]}
    batches = list(drafts[0]["coordinator_ms"])
    head = ("draft model", *(f"{name}, batch {batch}" for name in measured.values() for batch in batches))
    rows = [
        (_size(draft), *(f"{draft[key][batch]:.2f}" for key in measured for batch in batches))
        for draft in drafts
    ]
    return table(head, rows)


def _size(draft: Result) -> str:
    return f"{draft['num_parameters'] / 1e6:.0f} M"


def _spread(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.2f} ({spread['min']:.2f}-{spread['max']:.2f})"
