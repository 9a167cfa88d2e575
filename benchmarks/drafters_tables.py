"""What `benchmarks.drafters` has written, as tables of docs/drafters (comparison.md and trees.md)."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.drafter_claims import CLAIMS, ORDER
from benchmarks.drafter_families import FAMILIES, PLAIN
from benchmarks.drafters_summary import GOAL, WIDEST, is_sure

Cell = Mapping[str, Any]
_MOST_POSITIONS = 4
_NOT_MEASURED = "not measured"


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
    left = _left(results)
    if left:
        lines += ["", "### Cells that were not measured", "", *left]
    return "\n".join(lines)


def _left(results: Mapping[str, Any]) -> list[str]:
    """Name the cells of the plan that are not there; those of a place together, of any temperature."""
    plan, cells = results["plan"], results["cells"]
    names, temperatures = _names(cells), plan["temperatures"]
    places = list(itertools.product(plan["batches"], plan["targets"]))
    num_planned = len(places) * len(names) * len(temperatures)
    if num_planned == len(cells):
        return []
    said = f"{num_planned - len(cells)} of the {num_planned} that are planned."
    if results.get("missing"):
        said += f" For want of trained heads: {_listed(results['missing'])}."
    lines = [said, ""]
    there = Counter((one["cell"]["batch"], one["cell"]["target"], one["cell"]["family"]) for one in cells)
    for batch, target in places:
        left = [name for name in names if there[batch, target, name] < len(temperatures)]
        if left:
            lines.append(f"- {target}, batch {batch}: {_some_of(left, names)}")
    return lines


def _some_of(some: Sequence[str], names: Sequence[str]) -> str:
    """Name some of all families, or which they are not, if these are fewer."""
    others = [name for name in names if name not in some]
    if len(some) <= len(others):
        return _listed(some)
    return f"all families but {_listed(others)}" if others else "all families"


def _names(cells: Sequence[Cell]) -> list[str]:
    """Return the names of all families, measured or not, in the order of tables."""
    return list(dict.fromkeys((*(one.name for one in FAMILIES), *(one["cell"]["family"] for one in cells))))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def published(cells: Sequence[Cell]) -> str:
    """Return what papers claim beside what was measured, in Markdown."""
    shown = {one["cell"]["family"]: one for one in _headline_cells(cells)}
    lines = _head("family here", "paper", "claim", "here", "tokens / cost of a pass", "different here")
    for claim in CLAIMS:
        own = [shown[name] for name in claim.families if name in shown]
        best = max(own, key=lambda one: float(one["speedup"]["median"]), default=None)
        lines.append(
            _row(
                _listed(claim.families),
                claim.source,
                claim.says,
                _NOT_MEASURED if best is None else _speedup_by_class(best),
                _NOT_MEASURED if best is None else str(Costs.of(best)),
                claim.differs,
            )
        )
    return "\n".join(lines)


def trees(cells: Sequence[Cell]) -> str:
    """Return speedups of trees beside those of the same drafters' chains, in Markdown.

    They are of the costliest target, one request at a time.
    """
    target = costliest(cells)
    own = {
        (one["cell"]["family"], one["cell"]["temperature"]): one
        for one in cells
        if (one["cell"]["target"], one["cell"]["batch"]) == (target, 1)
    }
    temperatures = sorted({temperature for _, temperature in own})
    kinds = [f"{kind}, temperature {one:g}" for one in temperatures for kind in ("chains", "trees")]
    lines = _head("trees", "chains", *kinds)
    for family in FAMILIES:
        if family.chain is not None:
            names = (family.chain, family.name)
            found = [own.get((name, temperature)) for temperature in temperatures for name in names]
            speedups = [_NOT_MEASURED if one is None else _with_bounds(one["speedup"]) for one in found]
            lines.append(_row(f"`{family.name}`", f"`{family.chain}`", *speedups))
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
    machines = list(dict.fromkeys(map(_machine_of, cells)))
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"Measured {when} at commit {', '.join(commits)}, {'; '.join(machines)}, bf16."


def _machine_of(cell: Cell) -> str:
    where = cell["measured"]
    return str(cell.get("gpu") or f"{where['processor']}, {where['num_threads']} threads")


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
    head = (
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
    own = {(one["cell"]["family"], one["cell"]["temperature"]): one for one in alone}
    temperatures = sorted({temperature for _, temperature in own})
    lines = _head(*head)
    for name, temperature in itertools.product(_names(alone), temperatures):
        one = own.get((name, temperature))
        fields = [_NOT_MEASURED, *("-" for _ in head[3:])] if one is None else _details(one, classes)
        lines.append(_row(name, f"{temperature:g}", *fields))
    return lines


def _details(cell: Cell, classes: Sequence[str]) -> list[str]:
    return [
        str(cell["k"]),
        f"{cell['tokens_per_pass']:.2f}",
        " / ".join(f"{value:.2f}" for value in cell["reached"][:_MOST_POSITIONS]) or "-",
        f"{Costs.of(cell).verify:.2f}",
        f"{cell['draft_cost']:.2f}",
        _with_bounds(cell["speedup"]),
        *(f"{cell['classes'][name]['speedup']['median']:.2f}" for name in classes),
        f"{cell['possible']['median']:.2f}",
        f"{cell['possible_if_free']['median']:.2f}",
        _with_bounds(cell["share_of_possible"]),
    ]


def _with_bounds(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['lower']:.2f}-{ratio['upper']:.2f})"


def _sureness(cells: Sequence[Cell]) -> list[str]:
    """Say the worst share that is known well enough, what that leaves open, and name the cells that do."""
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
        shares = [one["share_of_possible"] for one in drafting]
        num_reached = sum(share["lower"] >= GOAL for share in shares)
        num_missed = sum(share["upper"] < GOAL for share in shares)
        num_all = len(drafting)
        lines += [
            *([""] if lines else []),
            f"The other {num_all - len(sure)} are too uncertain to be read as a share, so that the aim is "
            f"not shown to be reached everywhere. By the bounds {num_reached} of all {num_all} cells have "
            f"{GOAL} of what is possible or more, and {num_missed} have less; of the other "
            f"{num_all - num_reached - num_missed} neither is certain. Too uncertain are:",
            "",
            *(f"- {line}" for line in unsure),
        ]
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
    for name in _names(cells):
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
        return _NOT_MEASURED
    rates = [rate for one in cell["classes"].values() for rate in one["tokens_per_s"]["drafted"]]
    return (
        f"{cell['speedup']['median']:.2f} ({sum(rates) / len(rates):.0f}/s, "
        f"{cell['tokens_per_pass']:.2f}, {cell['share_of_possible']['median']:.2f})"
    )


def _takes(cells: Sequence[Cell]) -> list[str]:
    """Memory by target, and what was trained."""
    targets = list(dict.fromkeys(one["cell"]["target"] for one in cells))
    head = ("family", *(f"MB, {name}" for name in targets), "parameters", "tokens read", "minutes")
    lines = _head(*head)
    for family in (name for name in _names(cells) if name != PLAIN):
        own = {one["cell"]["target"]: one for one in cells if one["cell"]["family"] == family}
        if not own:
            lines.append(_row(family, *(_NOT_MEASURED for _ in head[1:])))
            continue
        training = next(iter(own.values())).get("training") or {}
        lines.append(
            _row(
                family,
                *(_megabytes(own.get(name)) for name in targets),
                _scaled(training.get("parameters"), 1e6, ".2f", " M"),
                _scaled(training.get("trained_tokens"), 1e6, ".1f", " M"),
                _scaled(training.get("elapsed_s"), 60, ".0f"),
            )
        )
    return lines


def _megabytes(cell: Cell | None) -> str:
    return _NOT_MEASURED if cell is None else f"{cell['memory_bytes'] / 1e6:.1f}"


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
    """Say whether speedups come in the order in which papers have them, as far as their bounds tell."""
    held, wrong, open_ = [], [], []
    for slower, faster in itertools.pairwise(there):
        low, high = slower["speedup"], faster["speedup"]
        names = f"`{faster['cell']['family']}` over `{slower['cell']['family']}`"
        kinds = {one["measured"].get("cpu_capability") for one in (slower, faster)}
        if len(kinds) > 1:
            open_.append(f"{names} (measured on different processors)")
        elif high["lower"] > low["upper"]:
            held.append(names)
        elif low["lower"] > high["upper"]:
            wrong.append(names)
        else:
            open_.append(f"{names} (bounds overlap)")
    told = [("As published", held), ("The other way round", wrong), ("Not told apart", open_)]
    return " ".join(f"{what}: {'; '.join(pairs)}." for what, pairs in told if pairs)


def _head(*names: str) -> list[str]:
    return [_row(*names), _row(*("---" for _ in names))]


def _row(*fields: str) -> str:
    return f"| {' | '.join(fields)} |"
