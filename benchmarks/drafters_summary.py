"""What cells of `benchmarks.drafters` have brought: compared, summed up over classes of text, laid out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from benchmarks.drafter_families import PLAIN
from benchmarks.drafters_plan import AS_IT_IS, INFLATED
from benchmarks.report import PairedRatio, Spread
from benchmarks.steady import Counted
from benchmarks.turns import Turns

GOAL = 0.85
"""Of the possible speedup."""
WIDEST = GOAL**-2
"""Bounds of a share that are further apart, one over the other, do not tell the goal from 1."""


@dataclass(slots=True)
class Runs:
    """Decoding in turns by class of text, and seconds of the bare forwards, an entry for each pair."""

    turns: dict[str, Turns] = field(default_factory=dict)
    parts: list[Mapping[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What the rounds of one turn were like, on average."""

    tokens_per_pass: float
    drafted_per_pass: float
    draft_s: float

    @classmethod
    def of(cls, counted: Counted, batch: int) -> Round:
        """Share out what was counted."""
        passes = counted.num_rounds * batch
        return cls(
            tokens_per_pass=counted.num_tokens / passes,
            drafted_per_pass=counted.drafts.num_draft_tokens / passes,
            draft_s=counted.drafts.draft_s / counted.num_rounds,
        )

    def possible(self, parts: Mapping[str, float], num_draft_tokens: int, *, is_free: bool = False) -> float:
        """Return the speedup that this allows, given bare forwards of no draft and of a whole one.

        With `is_free`, if drafts cost nothing but their rows.
        """
        base_s = parts["undrafted_s"]
        verify_s = base_s + (parts["verify_s"] - base_s) * self.drafted_per_pass / num_draft_tokens
        draft_s = 0.0 if is_free else self.draft_s
        return self.tokens_per_pass * parts["plain_s"] / (draft_s + verify_s)


def summarise(batch: int, num_draft_tokens: int, runs: Runs) -> dict[str, Any]:
    """Compare drafting with plain decoding, pair by pair, and with what its parts allow."""
    classes = {
        name: _of_class(batch, num_draft_tokens, turns, runs.parts) for name, turns in runs.turns.items()
    }
    plain_s = Spread(tuple(one["plain_s"] for one in runs.parts))
    draft_s = [one["round_ms"]["draft"] / 1e3 for one in classes.values()]
    return {
        "classes": classes,
        "speedup": _over_classes(one["speedup"] for one in classes.values()),
        "tokens_per_pass": _geometric_mean(one["tokens_per_pass"] for one in classes.values()),
        "possible": _over_classes(one["possible"] for one in classes.values()),
        "share_of_possible": _over_classes(one["share_of_possible"] for one in classes.values()),
        "possible_if_free": _over_classes(one["possible_if_free"] for one in classes.values()),
        "reached": _means([one["reached"] for one in classes.values()]),
        "draft_cost": sum(draft_s) / len(draft_s) / plain_s.median,
        "bare": {
            "plain_s": plain_s,
            "verify_s": Spread(tuple(one["verify_s"] for one in runs.parts)),
        },
    }


def _of_class(
    batch: int, num_draft_tokens: int, turns: Turns, parts: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    drafted = turns.counted["drafted"]
    total = Counted()
    for one in drafted:
        total.add(one)
    counts = total.drafts
    passes, rounds = total.num_rounds * batch, total.num_rounds
    speedup = turns.ratio("drafted", "plain")
    rounds_and_parts = [(Round.of(one, batch), its) for one, its in zip(drafted, parts, strict=True)]
    possible = [one.possible(its, num_draft_tokens) for one, its in rounds_and_parts]
    if_free = [one.possible(its, num_draft_tokens, is_free=True) for one, its in rounds_and_parts]
    shares = [measured / its for measured, its in zip(speedup.values, possible, strict=True)]
    return {
        "tokens_per_s": turns.rates("plain", "drafted"),
        "speedup": speedup,
        "most_stolen": turns.most_stolen,
        "tokens_per_pass": total.num_tokens / passes,
        "drafted_per_pass": counts.num_draft_tokens / passes,
        "share_with_drafts": counts.num_drafts / passes,
        "reached": [accepted / passes for accepted in counts.accepted[:num_draft_tokens]],
        "possible": PairedRatio(tuple(possible)),
        "share_of_possible": PairedRatio(tuple(shares)),
        "possible_if_free": PairedRatio(tuple(if_free)),
        "round_ms": {
            "draft": 1e3 * counts.draft_s / rounds,
            "verify": 1e3 * counts.verify_s / rounds,
            "rest": 1e3 * (total.seconds - counts.draft_s - counts.verify_s) / rounds,
        },
    }


def _over_classes(ratios: Iterable[PairedRatio]) -> PairedRatio:
    """Return the geometric means of several ratios, pair by pair."""
    return PairedRatio(
        tuple(_geometric_mean(pair) for pair in zip(*(one.values for one in ratios), strict=True))
    )


def _geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _means(lists: Sequence[Sequence[float]]) -> list[float]:
    """Return means place by place; what a list does not have counts as 0."""
    return [sum(place) / len(lists) for place in itertools.zip_longest(*lists, fillvalue=0.0)]


def is_sure(lower: float, upper: float) -> bool:
    """Whether a share between these bounds is known well enough to tell the goal from 1."""
    return upper <= WIDEST * lower


def headlines_of(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return what the tool's last lines say: of the costliest target, one request at a time, greedily."""
    drafting = [cell for cell in cells if cell["cell"].family != PLAIN]
    target = INFLATED if any(one["cell"].target == INFLATED for one in drafting) else AS_IT_IS
    shown = [
        one
        for one in drafting
        if (one["cell"].target, one["cell"].batch, one["cell"].temperature) == (target, 1, 0.0)
    ]
    headlines: dict[str, float] = {}
    for one in shown:
        name = one["cell"].family
        headlines[f"speedup_b1_t0_{name}"] = one["speedup"].median
        headlines[f"tokens_per_pass_{name}"] = one["tokens_per_pass"]
        headlines[f"share_of_possible_{name}"] = one["share_of_possible"].median
    sure = [one["share_of_possible"] for one in drafting]
    sure = [share for share in sure if is_sure(share.lower, share.upper) or share.upper < GOAL]
    if sure:
        headlines["worst_share_of_possible"] = min(share.median for share in sure)
    if shown:
        headlines["best_speedup_b1_t0_repeated"] = max(
            one["classes"]["repeated"]["speedup"].median for one in shown
        )
    return headlines


def short_of(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the cells that are below the goal with 95 % confidence, and where their rounds go."""
    lines = []
    for one in cells:
        share: PairedRatio = one["share_of_possible"]
        if one["cell"].family != PLAIN and share.upper < GOAL:
            rounds = _means([list(its["round_ms"].values()) for its in one["classes"].values()])
            draft, verify, rest = rounds
            lines.append(
                f"{one['cell'].name}: {share.median:.2f} of what is possible, at most {share.upper:.2f}; "
                f"a round: {draft:.2f} ms drafting, {verify:.2f} verifying, {rest:.2f} the rest; bare "
                f"{1e3 * one['bare']['plain_s'].median:.2f} and {1e3 * one['bare']['verify_s'].median:.2f}"
            )
    return lines


def shortened_of(cells: Sequence[Mapping[str, Any]], tokens_per_prompt: int) -> str:
    """Say how many cells decoded fewer tokens than planned, for time; nothing if none did."""
    fewer = [one["tokens_per_prompt"] for one in cells if one["tokens_per_prompt"] < tokens_per_prompt]
    if not fewer:
        return ""
    span = f"{min(fewer)} to {max(fewer)}" if min(fewer) < max(fewer) else f"{min(fewer)}"
    return f"{len(fewer)} of {len(cells)} cells decoded {span} tokens of each text, not {tokens_per_prompt}"


def table_of(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Lay out all cells for people."""
    classes = list(cells[0]["classes"]) if cells else []
    table = Table(
        "cell",
        "k",
        "tok/pass",
        "reached",
        "draft cost",
        "MB",
        "speedup",
        "",
        *classes,
        "possible",
        "free",
        "share",
    )
    for one in cells:
        ratio = one["speedup"]
        table.add_row(
            one["cell"].name,
            str(one["k"]),
            f"{one['tokens_per_pass']:.2f}",
            " ".join(f"{share:.2f}" for share in one["reached"][:4]),
            f"{one['draft_cost']:.2f}",
            f"{one['memory_bytes'] / 1e6:.1f}",
            f"{ratio.median:.2f}",
            f"{ratio.lower:.2f}-{ratio.upper:.2f}",
            *(f"{one['classes'][name]['speedup'].median:.2f}" for name in classes),
            f"{one['possible'].median:.2f}",
            f"{one['possible_if_free'].median:.2f}",
            f"{one['share_of_possible'].median:.2f}",
        )
    return table
