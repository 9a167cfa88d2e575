"""What `benchmarks.drafters` has written, as the tables of docs/drafters/comparison.md."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.drafter_claims import CLAIMS, ORDER
from benchmarks.drafter_families import PLAIN
from benchmarks.drafters_summary import GOAL, WIDEST, is_sure

Cell = Mapping[str, Any]
_MOST_POSITIONS = 4


def measured(results: Mapping[str, Any], picture: str) -> str:
    """Return the measured part of the page, in Markdown; `picture` is where the page finds it."""
    cells: Sequence[Cell] = results["cells"]
    lines = [_where(cells), "", f"![Speedups, what was possible, and acceptance by position]({picture})"]
    for target in dict.fromkeys(one["cell"]["target"] for one in cells):
        own = [one for one in cells if one["cell"]["target"] == target]
        lines += ["", f"### The {target} target, one request at a time", "", *_in_detail(own)]
        lines += ["", f"### The {target} target, by batch size", "", *_by_batch(own)]
    lines += ["", "### What a family takes beside the target", "", *_takes(cells)]
    lines += ["", "### How sure the shares are", "", *_sureness(cells)]
    order = _order(cells)
    if order:
        lines += ["", "### Medusa, Hydra, EAGLE, EAGLE-3", "", *order]
    if results.get("short"):
        lines += ["", "Below the aim:", "", *(f"- {line}" for line in results["short"])]
    if results.get("shortened"):
        lines += ["", f"Cut short, because of the time that a cell may take: {results['shortened']}."]
    missing = results.get("missing") or ()
    if missing:
        lines += ["", f"Not measured, for want of trained heads: {', '.join(missing)}."]
    num_left = (results.get("rest") or {}).get("num_cells", 0)
    if num_left:
        lines += ["", f"The run is not at its end: {num_left} cells are left."]
    return "\n".join(lines)


def published(cells: Sequence[Cell]) -> str:
    """Return what papers claim beside what was measured, in Markdown."""
    shown = {one["cell"]["family"]: one for one in _headline_cells(cells)}
    lines = _head("family here", "paper", "claim", "here", "tokens / cost of a pass", "different here")
    for claim in CLAIMS:
        own = [shown[name] for name in claim.families if name in shown]
        best = max(own, key=lambda one: float(one["speedup"]["median"]), default=None)
        lines.append(
            _row(
                ", ".join(f"`{name}`" for name in claim.families),
                claim.source,
                claim.says,
                "-" if best is None else _speedup_by_class(best),
                "-" if best is None else str(Costs.of(best)),
                claim.differs,
            )
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a pass brings, and what it costs in plain steps."""

    tokens: float
    verify: float
    draft: float
    rest: float
    """Measured speedup over what these three allow."""

    @classmethod
    def of(cls, cell: Cell) -> Costs:
        """Take them out of what was possible, with drafts as they are and with free ones."""
        tokens = float(cell["tokens_per_pass"])
        verify = tokens / cell["possible_if_free"]["median"]
        whole = tokens / cell["possible"]["median"]
        return cls(
            tokens=tokens,
            verify=verify,
            draft=whole - verify,
            rest=cell["speedup"]["median"] / cell["possible"]["median"],
        )

    @property
    def whole(self) -> float:
        """Of a pass with its drafting."""
        return self.verify + self.draft

    def __str__(self) -> str:
        return f"{self.tokens:.2f} / ({self.verify:.2f} + {self.draft:.2f})"


def _where(cells: Sequence[Cell]) -> str:
    """Say when, at which commits and on what cells were measured."""
    found = [one["measured"] for one in cells]
    days = sorted({one["date"][:10] for one in found})
    commits = list(dict.fromkeys(one["commit"][:12] for one in found))
    machines = list(dict.fromkeys(f"{one['processor']}, {one['num_threads']} threads" for one in found))
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"Measured {when} at commit {', '.join(commits)}, {'; '.join(machines)}, bf16."


def costliest(cells: Sequence[Cell]) -> str:
    """Return the target whose steps take longest."""
    slowest = max(cells, key=lambda one: float(one["bare"]["plain_s"]["median"]))
    return str(slowest["cell"]["target"])


def _headline_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return those of the costliest target, one request at a time, at temperature 0."""
    if not cells:
        return []
    target = costliest(cells)
    return [
        one
        for one in cells
        if (one["cell"]["target"], one["cell"]["batch"], one["cell"]["temperature"]) == (target, 1, 0.0)
    ]


def _speedup_by_class(cell: Cell) -> str:
    by_class = ", ".join(f"{name} {one['speedup']['median']:.2f}" for name, one in cell["classes"].items())
    return f"`{cell['cell']['family']}` {cell['speedup']['median']:.2f} ({by_class})"


def _in_detail(cells: Sequence[Cell]) -> list[str]:
    alone = [one for one in cells if one["cell"]["batch"] == min(one["cell"]["batch"] for one in cells)]
    classes = list(alone[0]["classes"])
    lines = _head(
        "family",
        "temperature",
        "k",
        "tokens per pass",
        "reached 1 / 2 / 3 / 4",
        "verifying",
        "draft cost",
        "speedup",
        *classes,
        "possible",
        "if drafts were free",
        "share",
    )
    for one in alone:
        ratio, share = one["speedup"], one["share_of_possible"]
        lines.append(
            _row(
                one["cell"]["family"],
                f"{one['cell']['temperature']:g}",
                str(one["k"]),
                f"{one['tokens_per_pass']:.2f}",
                " / ".join(f"{value:.2f}" for value in one["reached"][:_MOST_POSITIONS]) or "-",
                f"{Costs.of(one).verify:.2f}",
                f"{one['draft_cost']:.2f}",
                _with_bounds(ratio),
                *(f"{one['classes'][name]['speedup']['median']:.2f}" for name in classes),
                f"{one['possible']['median']:.2f}",
                f"{one['possible_if_free']['median']:.2f}",
                _with_bounds(share),
            )
        )
    return lines


def _with_bounds(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['lower']:.2f}-{ratio['upper']:.2f})"


def _sureness(cells: Sequence[Cell]) -> list[str]:
    """Say the worst share that is known well enough, and name the cells whose shares are not."""
    drafting = [one for one in cells if one["cell"]["family"] != PLAIN]
    sure = [one for one in drafting if _is_sure(one)]
    unsure = unsure_of(cells)
    lines = []
    if sure:
        worst = min(sure, key=lambda one: float(one["share_of_possible"]["median"]))
        lines.append(
            f"{len(sure)} of {len(drafting)} drafting cells have bounds that are at most {WIDEST:.2f} apart, "
            f"one over the other, which tells {GOAL} from 1. The worst share of these is "
            f"{_with_bounds(worst['share_of_possible'])}: `{worst['cell']['family']}`, {_place(worst)}."
        )
    if unsure:
        lines += [*([""] if lines else []), "Too uncertain to be read as a share:", ""]
        lines += [f"- {line}" for line in unsure]
    return lines


def unsure_of(cells: Sequence[Cell]) -> list[str]:
    """Name the cells whose shares of what is possible are too uncertain, those of a place together."""
    by_place: dict[str, list[str]] = {}
    for one in cells:
        if one["cell"]["family"] != PLAIN and not _is_sure(one):
            by_place.setdefault(_place(one), []).append(f"`{one['cell']['family']}`")
    return [f"{place}: {', '.join(names)}" for place, names in by_place.items()]


def _is_sure(cell: Cell) -> bool:
    share = cell["share_of_possible"]
    return is_sure(share["lower"], share["upper"])


def _place(cell: Cell) -> str:
    where = cell["cell"]
    return f"{where['target']}, batch {where['batch']}, temperature {where['temperature']:g}"


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


def _takes(cells: Sequence[Cell]) -> list[str]:
    """Memory by target, and what was trained."""
    targets = list(dict.fromkeys(one["cell"]["target"] for one in cells))
    lines = _head("family", *(f"MB, {name}" for name in targets), "parameters", "tokens read", "minutes")
    for family in dict.fromkeys(one["cell"]["family"] for one in cells if one["cell"]["family"] != PLAIN):
        own = {one["cell"]["target"]: one for one in cells if one["cell"]["family"] == family}
        training = next(iter(own.values())).get("training") or {}
        lines.append(
            _row(
                family,
                *(f"{own[name]['memory_bytes'] / 1e6:.1f}" if name in own else "-" for name in targets),
                _scaled(training.get("parameters"), 1e6, ".2f", " M"),
                _scaled(training.get("trained_tokens"), 1e6, ".1f", " M"),
                _scaled(training.get("elapsed_s"), 60, ".0f"),
            )
        )
    return lines


def _scaled(value: float | None, by: float, precision: str, unit: str = "") -> str:
    return "-" if value is None else f"{value / by:{precision}}{unit}"


def _order(cells: Sequence[Cell]) -> list[str]:
    """Compare the families of ORDER, each with the one before it; what a factor is made of explains it."""
    shown = {one["cell"]["family"]: one for one in _headline_cells(cells)}
    there = [shown[name] for name in ORDER if name in shown]
    if len(there) < 2:
        return []
    lines = [
        "Chains, one request at a time, temperature 0. A factor between two speedups is that of tokens per "
        "pass, over that of what a pass costs, times that of what planning and the rest leave.",
        "",
        *_head("family", "k", "tokens per pass", "reached", "cost of a pass", "speedup", "over the last one"),
    ]
    before: Costs | None = None
    for one in there:
        costs = Costs.of(one)
        factor = "-"
        if before is not None:
            tokens, cost, rest = (
                costs.tokens / before.tokens,
                costs.whole / before.whole,
                costs.rest / before.rest,
            )
            factor = f"{tokens / cost * rest:.2f} = {tokens:.2f} / {cost:.2f} x {rest:.2f}"
        lines.append(
            _row(
                f"`{one['cell']['family']}`",
                str(one["k"]),
                f"{costs.tokens:.2f}",
                " / ".join(f"{value:.2f}" for value in one["reached"][:_MOST_POSITIONS]),
                f"{costs.verify:.2f} + {costs.draft:.2f}",
                f"{one['speedup']['median']:.2f}",
                factor,
            )
        )
        before = costs
    return [*lines, "", _verdict(there)]


def _verdict(there: Sequence[Cell]) -> str:
    """Say whether speedups come in the order in which papers have them."""
    wrong = [
        f"`{slower['cell']['family']}` is not below `{faster['cell']['family']}`"
        for slower, faster in itertools.pairwise(there)
        if slower["speedup"]["median"] >= faster["speedup"]["median"]
    ]
    return f"Not the published order: {'; '.join(wrong)}." if wrong else "This is the published order."


def _head(*names: str) -> list[str]:
    return [_row(*names), _row(*("---" for _ in names))]


def _row(*fields: str) -> str:
    return f"| {' | '.join(fields)} |"
