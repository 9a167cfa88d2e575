"""What a drafter costs those who do not gain by it: a server with one, and one without, over HTTP, in turn.

    python -m benchmarks.beside_plain --json benchmarks/results/beside-plain.json      # about nine minutes
    python -m benchmarks.beside_plain --quick                                          # under three

Both servers are up all the time, on the same cores; clients ask one of them at a time, each again as soon as
it has its answer. `none`: speculation is off. `controller`: the other server, which decides by itself.
`own_k0`: the same server, by requests that ask for no drafts. Everything shares the cores: who sends, Serve's
proxy and doors, the coordinator, the target and the draft model. So this is the hardest place for a drafter
to pay: it takes from the target what it computes, and whatever the coordinator does for it comes on top.

`never_slower` compares the same in an engine of its own, with what is made up accepted; here it is what the
demo pair accepts of held-out prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.progress import Progress

from benchmarks.closed_loop import ClosedLoop
from benchmarks.compile_states import wait_compiled
from benchmarks.cores import keep_to, part_with_a_core
from benchmarks.overload import completion
from benchmarks.report import PairedRatio, progress_bar, report_headlines, to_plain, write_results
from benchmarks.served import ServedProcess, serving
from benchmarks.stolen import stolen_seconds
from benchmarks.workload import piece, read_prompts
from deploy.load.client import load_client
from deploy.load.generator import Timeline

_PATH = "/v1/completions"
_MODEL = "demo"
_COMPILE_S = 300.0
_TIMEOUT_S = 120.0
_SETTLE_S = 1.2
"""Longer than counters take to get from a coordinator to `/metrics`."""
_NICENESS = 5
"""Of the servers: who sends goes first where they share cores."""
_PREFIX = "ray_drafthouse_"
_TITLES: Mapping[str, tuple[str, ...]] = {
    "target": ("ray::TargetWorkerProcess",),
    "draft": ("ray::DraftWorkerProcess",),
    "coordinator": ("ray::ServeReplica:drafthouse:Coordinator",),
    "door": ("ray::ServeReplica:drafthouse:Ingress",),
    "proxy": ("ray::ProxyActor", "ray::HAProxyManager", "haproxy"),
    "rest of Ray": ("raylet", "gcs_server", "ray::ServeController", "ray::Directory"),
}
_PARTS = {
    "coordinator": "coordinator_time_seconds",
    "waiting for drafts": "draft_time_seconds",
    "verifying": "verify_time_seconds",
}
"""Of a round, by the engine's own counters."""
_TOKENS = {
    "generated": "generation_tokens_total",
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
}
VARIANTS = ("none", "controller", "own_k0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured."""

    batches: tuple[int, ...]
    """Clients at a time."""
    num_turns: int
    duration_s: float
    """Of one turn of one of them."""
    warm_up_s: float
    """Of each of them with each batch: the controller makes up its mind."""
    num_tokens: int = 128
    prompt_characters: int = 160
    num_threads: int = 1


FULL = Plan(batches=(1, 4, 16), num_turns=6, duration_s=7.0, warm_up_s=10.0)
QUICK = Plan(batches=(16,), num_turns=3, duration_s=5.0, warm_up_s=8.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one of them did in one turn."""

    num_requests: int
    tokens_per_s: float
    ms_per_round: Mapping[str, float]
    """By part, and all of it."""
    per_round: Mapping[str, float]
    """Tokens that came of a round, and those that were drafted and accepted."""
    trial_rounds: Mapping[str, float]
    """Share of rounds in which the controller tried something."""
    rounds_by_mode: Mapping[str, float]
    """Shares."""
    cpu_cores: Mapping[str, float]
    """Cores that the processes of a part kept busy, on average."""
    stolen: float
    """Share of the cores' time that others on the same machine had."""


@dataclass(slots=True)
class _Side:
    """One of those that are compared."""

    server: ServedProcess
    client: httpx.AsyncClient
    clients: ClosedLoop
    turns: list[Turn] = field(default_factory=list)

    async def counters(self) -> dict[str, float]:
        text = (await self.client.get("/metrics")).text
        counted: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix(_PREFIX)
                if mode := sample.labels.get("mode"):
                    name = f"{name} {mode}"
                counted[name] = counted.get(name, 0.0) + sample.value
        return counted


def config_of(plan: Plan, family: Path, *, drafts: bool) -> dict[str, Any]:
    """Return the demo pair, or its target alone, as the presets for CPUs have them."""
    model = {"dtype": "bfloat16", "num_threads": plan.num_threads}
    drafter: dict[str, Any] = {"method": "none"}
    if drafts:
        drafter = {"method": "draft_model", "model": str((family / "draft").resolve())}
        drafter["num_threads"] = plan.num_threads
    return {
        "target": {"model": str((family / "target").resolve()), **model},
        "speculative_config": drafter,
        "cache": {"memory_bytes": 256 << 20},
        "scheduler": {"max_num_seqs": max(plan.batches)},
        "http": {
            "served_model_name": _MODEL,
            "max_deliveries_per_s": 150,
            "niceness": _NICENESS,
            "proxy": "python",  # two servers: HAProxy has ports of its own, of which there is one each
        },
    }


def bodies_of(
    plan: Plan, prompts: Sequence[str], num_draft_tokens: int | None
) -> Callable[[], dict[str, Any]]:
    """Return what makes one request after the other; all variants get the same ones, in the same order."""
    numbers = itertools.count()

    def body() -> dict[str, Any]:
        number = next(numbers)
        request = completion(piece(prompts, number, plan.prompt_characters), plan.num_tokens, number)
        if num_draft_tokens is not None:
            request["speculation"] = {"num_speculative_tokens": num_draft_tokens}
        return request

    return body


def turn_of(
    timelines: Sequence[Timeline],
    seconds: float,
    rounds: Mapping[str, float],
    cpu_s: Mapping[str, float],
    stolen: float,
) -> Turn:
    """Return what a turn came to; `rounds` are differences of the server's counters."""
    num_rounds = max(1.0, rounds.get("rounds_total", 0.0))
    modes = {
        name.partition(" ")[2]: count
        for name, count in rounds.items()
        if name.startswith("overlap_rounds_total ") and count > 0
    }
    per_round = {part: 1e3 * rounds.get(f"{name}_total", 0.0) / num_rounds for part, name in _PARTS.items()}
    return Turn(
        num_requests=len(timelines),
        tokens_per_s=sum(one.num_output_tokens or 0 for one in timelines) / seconds,
        ms_per_round={
            **per_round,
            "all": 1e3 * rounds.get("round_time_seconds_total", 0.0) / num_rounds,
        },
        per_round={what: rounds.get(name, 0.0) / num_rounds for what, name in _TOKENS.items()},
        trial_rounds={
            kind: rounds.get(f"speculation_{kind}_rounds_total", 0.0) / num_rounds
            for kind in ("probe", "audit", "stretch", "comparison")
        },
        rounds_by_mode={mode: count / num_rounds for mode, count in modes.items()},
        cpu_cores={part: busy_s / seconds for part, busy_s in cpu_s.items()},
        stolen=stolen,
    )


async def _take_turn(side: _Side, batch: int, duration_s: float, num_cores: int) -> Turn:
    loop = asyncio.get_running_loop()
    before, cpu_s, stolen_s = await side.counters(), side.server.cpu_seconds(_TITLES), stolen_seconds()
    began_s = loop.time()
    timelines = await side.clients.run(batch, began_s + duration_s)
    seconds = loop.time() - began_s
    stolen_s = stolen_seconds() - stolen_s
    cpu_s = {part: its_s - cpu_s[part] for part, its_s in side.server.cpu_seconds(_TITLES).items()}
    await asyncio.sleep(_SETTLE_S)
    after = await side.counters()
    rounds = {name: count - before.get(name, 0.0) for name, count in after.items()}
    return turn_of(timelines, seconds, rounds, cpu_s, stolen_s / (seconds * num_cores))


async def compare(
    plan: Plan,
    servers: Mapping[str, ServedProcess],
    prompts: Sequence[str],
    progress: Progress,
    num_cores: int,
) -> list[dict[str, Any]]:
    """Return the turns of every batch, by variant; `servers` has `none` and `controller`."""
    cells: list[dict[str, Any]] = []
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(
                load_client(server.url, connect_s=_TIMEOUT_S, read_s=_TIMEOUT_S)
            )
            for name, server in servers.items()
        }
        for batch in plan.batches:
            task = progress.add_task(f"{batch} at a time", total=len(VARIANTS) * (1 + plan.num_turns))
            sides: dict[str, _Side] = {}
            for name in VARIANTS:
                where = "none" if name == "none" else "controller"
                bodies = bodies_of(plan, prompts, 0 if name == "own_k0" else None)
                loop = ClosedLoop(clients[where], _PATH, bodies, lambda: None)
                sides[name] = _Side(servers[where], clients[where], loop)
                await sides[name].clients.run(batch, asyncio.get_running_loop().time() + plan.warm_up_s)
                progress.advance(task)
            for number in range(plan.num_turns):
                for name in VARIANTS[:: 1 if number % 2 == 0 else -1]:
                    turn = await _take_turn(sides[name], batch, plan.duration_s, num_cores)
                    sides[name].turns.append(turn)
                    progress.advance(task)
            cells.append(
                {
                    "batch": batch,
                    "turns": {name: side.turns for name, side in sides.items()},
                    "ratios": {name: ratio(sides[name].turns, sides["none"].turns) for name in VARIANTS[1:]},
                }
            )
    return cells


def ratio(ours: Sequence[Turn], theirs: Sequence[Turn]) -> PairedRatio:
    """Return how many times as fast `ours` is, turn by turn."""
    pairs = zip(ours, theirs, strict=True)
    return PairedRatio(tuple(one.tokens_per_s / other.tokens_per_s for one, other in pairs))


def headlines(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers to watch: the least of all batches."""
    return {
        f"{name}_vs_none_{what}": min(getattr(cell["ratios"][name], what) for cell in cells)
        for name in VARIANTS[1:]
        for what in ("median", "upper")
    }


def main(
    quick: Annotated[bool, typer.Option(help="One batch, fewer and shorter turns.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    models: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Compare a server that has a drafter with one that has none, over HTTP.

    Example: python -m benchmarks.beside_plain --quick --json runs/beside-plain.json
    """
    plan = QUICK if quick else FULL
    prompts = read_prompts(models / "prompts.jsonl")
    own, cores = part_with_a_core()
    keep_to(own)
    with progress_bar() as progress, contextlib.ExitStack() as stack:
        task = progress.add_task("starting two servers", total=2)
        servers: dict[str, ServedProcess] = {}
        for name, drafts in (("none", False), ("controller", True)):
            server = stack.enter_context(
                serving(config_of(plan, models, drafts=drafts), cores, niceness=_NICENESS)
            )
            server.wait_healthy()
            wait_compiled(server.url, _COMPILE_S, {"target", "draft"} if drafts else {"target"})
            servers[name] = server
            progress.advance(task)
        cells = asyncio.run(compare(plan, servers, prompts, progress, len(cores)))
    numbers = headlines(cells)
    sharing = {"server": len(cores), "is_shared_with_sender": own == cores}
    write_results(
        json_file, to_plain({"plan": plan, "num_cores": sharing, "cells": cells, "headlines": numbers})
    )
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
