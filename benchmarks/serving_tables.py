"""What faults, overload and proxies came to, as text for the pages, from the raw results.

python -m benchmarks.serving_tables           # everything that there are raw results of
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.pages import origin_of, put_into, table

SCRIPT = "benchmarks/serving_tables.py"

Result = Mapping[str, Any]


def faults(results: Result) -> str:
    """Return what random faults under load did."""
    numbers = results["headlines"]
    rows = [
        (kind.replace("_", " "), of["number"], f"{of['median_s']:.1f}", f"{of['max_s']:.1f}")
        for kind, of in results["recovery_by_kind"].items()
    ]
    pauses_s = [stream["longest_pause_s"] for stream in results["streams"]]
    refusals = ", ".join(f"{name} ({count})" for name, count in sorted(results["refusals"].items()))
    planned = results["plan"]["num_faults"]
    cut = "" if numbers["faults"] == planned else f" ({planned} were planned; the run was cut)"
    refused = f"refused for good: {refusals}" if refusals else "nobody was refused for good"
    limit_s = results["plan"]["recovery_limit_s"]
    too_long = Counter(fault["kind"] for fault in results["faults"] if fault["recovery_s"] is None)
    named = ", ".join(f"{kind.replace('_', ' ')} ({count})" for kind, count in sorted(too_long.items()))
    given_up = sum(fault.get("num_nodes_given_up", 0) for fault in results["faults"])
    return "\n\n".join(
        [
            f"Measured: {_parts(results)}.",
            table(("fault", "number", "all there again, median (s)", "longest"), rows),
            f"{numbers['faults']} faults{cut}, during which {results['num_streams']} streams were read: "
            f"{numbers['lost']} lost, {numbers['wrong']} with a wrong token. "
            f"{results['num_broken_connections']} connections broke; {refused}. "
            f"95 % of the faults were recovered from within "
            f"{numbers['recovery_p95_s']:.1f} s, the loading of weights included"
            + (f"; not within {limit_s:g} s, which count as so long: {named}" if named else "")
            + (f"; {given_up} nodes were given up by Ray, and started again" if given_up else "")
            + ". A stream stood still for "
            f"at most {max(pauses_s):.1f} s, half of them for less than {statistics.median(pauses_s):.1f} s.",
        ]
    )


def _parts(results: Result) -> str:
    return "; ".join(
        f"{part['num_faults']} faults in a run begun on {origin_of(part['measured'])}"
        for part in results["parts"]
    )


def _overload_row(turns: Sequence[Result]) -> tuple[str | int, ...]:
    """Return what became of one load: of all its turns together."""
    goodput = [float(turn["goodput_per_s"]) for turn in turns]
    outcomes = ("good", "late", "status 429")
    return (
        f"{turns[0]['share']:g}",
        f"{turns[0]['requests_per_s']:.1f}",
        sum(turn["num_requests"] for turn in turns),
        *(sum(turn["outcomes"].get(outcome, 0) for turn in turns) for outcome in outcomes),
        f"{statistics.fmean(goodput):.0f} ({min(goodput):.0f}-{max(goodput):.0f})",
        f"{statistics.median(turn['ttft_p50_s'] for turn in turns):.2f}",
        f"{max(turn['max_lateness_s'] for turn in turns):.2f}",
    )


def overload(results: Result) -> str:
    """Return what is left of goodput, and what many streams lost."""
    measured, streams = results["overload"], results["streams"]
    loads = measured["loads"]
    shares = sorted({float(load["share"]) for load in loads})
    rows = [_overload_row([load for load in loads if load["share"] == share]) for share in shares]
    head = (
        "of capacity",
        "requests/s",
        "sent",
        "good",
        "late",
        "refused (429)",
        "goodput (tokens/s)",
        "first token, p50 (s)",
        "sent late by up to (s)",
    )
    num_turns = len(loads) // len(shares)
    num_again = sum(load["num_tries"] - 1 for load in loads)
    most_stolen = max(load["stolen"] for load in loads)
    ratio = results["headlines"]["goodput_at_5x_vs_peak"]
    return "\n\n".join(
        [
            f"Measured on {origin_of(results['environment'])}. Capacity: "
            f"{measured['capacity_requests_per_s']:.2f} requests/s{_cores(results)}.",
            table(head, rows),
            f"Each load was sent {num_turns} times, there and back; goodput is the mean, with the least and "
            f"most. Others on the same machine had at most {most_stolen:.0%} of the server's cores; "
            f"{num_again} times a load was sent again because they had more.",
            f"At {shares[-1]:g} times the capacity goodput is {ratio:.2f} of its peak. "
            f"{streams['num_streams']} streams at once ({streams['most_at_once']} of them were open "
            f"together): {streams['num_complete']} complete, {streams['num_lost_bytes']} of "
            f"{streams['num_bytes']} bytes lost, in {streams['seconds']:.0f} s.",
        ]
    )


def _cores(results: Result) -> str:
    cores = results.get("num_cores")
    if cores is None or cores["is_shared_with_sender"]:
        return ", on cores that the sender of the load used, too"
    return f", on {cores['server']} cores; the sender of the load had one more"


def doors(results: Result) -> str:
    """Return the two proxies side by side: medians over turns."""
    turns: Sequence[Result] = results["turns"]
    kinds = list(dict.fromkeys(turn["proxy"] for turn in turns))

    def row(name: str, value: Callable[[Result], float]) -> tuple[str, ...]:
        medians = (
            statistics.median(value(turn) for turn in turns if turn["proxy"] == kind) for kind in kinds
        )
        return (name, *(f"{one:.1f}" for one in medians))

    rows = [
        row(f"{what}, {point} (ms)", partial(_latency_ms, name=name, point=point))
        for name, what in _REQUESTS.items()
        for point in ("p50", "p99")
    ]
    rows.append(row("streams per second", _streams_per_s))
    rows += [
        row(f"CPU time of the {part} per stream (ms)", partial(_cpu_ms, part=part))
        for part in turns[0]["cpu_s"]
    ]
    plan = results["plan"]
    turns_of_each = plan["num_turns"]
    how = "one turn each" if turns_of_each == 1 else f"medians of {turns_of_each} turns"
    num_lost = sum(turn["streams"]["num_lost_bytes"] for turn in turns)
    return "\n\n".join(
        [
            f"Measured on {origin_of(results['environment'])}: {how}, with "
            f"{plan['num_streams']} streams of {plan['num_stream_tokens']} tokens at once.",
            table(("", *kinds), rows),
            f"{num_lost} bytes were lost.",
        ]
    )


def _latency_ms(turn: Result, *, name: str, point: str) -> float:
    return float(turn["milliseconds"][name][point])


def _streams_per_s(turn: Result) -> float:
    return float(turn["streams"]["num_complete"] / turn["streams"]["seconds"])


def _cpu_ms(turn: Result, *, part: str) -> float:
    return float(1000.0 * turn["cpu_s"][part] / turn["streams"]["num_streams"])


_REQUESTS = {
    "requests": "`/v1/models` on one connection",
    "connections": "`/v1/models`, a connection each",
    "completions": "a completion of one token",
}


def beside_plain(results: Result) -> str:
    """Return what a server with a drafter did beside one without."""
    parts = []
    for cell in results["cells"]:
        rows = [_beside_row(name, turns, cell["ratios"].get(name)) for name, turns in cell["turns"].items()]
        head = ("", f"{cell['batch']} at a time: tokens/s", "over no speculation", *_BESIDE, *_BESIDE_CORES)
        parts.append(table(head, rows))
    plan = results["plan"]
    most_stolen = max(
        turn["stolen"] for cell in results["cells"] for turns in cell["turns"].values() for turn in turns
    )
    return "\n\n".join(
        [
            f"Measured on {origin_of(results['environment'])}{_cores(results)}: {plan['num_turns']} turns of "
            f"{plan['duration_s']:.0f} s of each, requests of {plan['num_tokens']} tokens. Medians; ratios "
            "turn by turn, with what the true one is between with 95 % confidence; milliseconds of a round, "
            "tokens drafted in one, and cores that processes kept busy.",
            *parts,
            f"Others on the same machine had at most {most_stolen:.0%} of its cores.",
        ]
    )


_BESIDE = ("coordinator (ms)", "verifying (ms)", "drafted")
_BESIDE_CORES = ("target (cores)", "draft", "coordinator")
_BESIDE_NAMES = {
    "none": "no drafter",
    "controller": "drafter, controller",
    "own_k0": "drafter, requests with k = 0",
}


def _beside_row(name: str, turns: Sequence[Result], ratio: Result | None) -> tuple[str, ...]:
    def of(part: str, what: str) -> float:
        return statistics.median(float(turn[part][what]) for turn in turns)

    versus = "" if ratio is None else f"{ratio['median']:.2f} ({ratio['lower']:.2f}-{ratio['upper']:.2f})"
    return (
        _BESIDE_NAMES[name],
        f"{statistics.median(float(turn['tokens_per_s']) for turn in turns):.0f}",
        versus,
        f"{of('ms_per_round', 'coordinator'):.2f}",
        f"{of('ms_per_round', 'verifying'):.2f}",
        f"{of('per_round', 'drafted'):.2f}",
        *(f"{of('cpu_cores', part):.2f}" for part in ("target", "draft", "coordinator")),
    )


class Part(NamedTuple):
    """A part of a page."""

    page: str
    name: str
    text: Callable[[Result], str]


PARTS = {
    "chaos.json": Part("performance.md", "faults", faults),
    "overload.json": Part("performance.md", "overload", overload),
    "overload_python.json": Part("performance.md", "overload through python", overload),
    "beside-plain.json": Part("performance.md", "beside no drafter", beside_plain),
    "doors.json": Part("operations/door.md", "proxies", doors),
}
"""By file of raw results."""


def main(
    results: Annotated[Path, typer.Option(help="Folder of raw results.")] = Path("benchmarks/results"),
    docs: Annotated[Path, typer.Option(help="Folder of the pages.")] = Path("docs"),
) -> None:
    """Write what was measured into the pages.

    Example: python -m benchmarks.serving_tables
    """
    for name, part in PARTS.items():
        if (results / name).exists():
            page = docs / part.page
            text = part.text(json.loads((results / name).read_text()))
            page.write_text(put_into(page.read_text(), part.name, SCRIPT, text))


if __name__ == "__main__":
    typer.run(main)
