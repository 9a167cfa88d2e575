"""Random faults under load: is a request lost, is a token wrong, how long until everything is there again?

    python -m benchmarks.chaos --json benchmarks/results/chaos.json              # 200 faults
    python -m benchmarks.chaos --json benchmarks/results/chaos.json --resume     # the rest of a run
    python -m benchmarks.chaos --quick                                           # 20, fast health checks

The demo pair in float32 on a Ray cluster of several nodes on this machine: two target groups, each
on a node, a draft worker on a third, two ingress replicas. Streams run all the time, greedy and sampled, with
speculation. Processes are killed or stopped at random, one fault after the other: draft worker, rank of a
target, coordinator, ingress, HTTP proxy, a whole Ray node, a rank or an ingress that hangs, a slow drafter, a
coordinator that is cut off until it is given up and then comes back; as root also a worker that the kernel
ends for want of memory, a full disk, and, with each node in a network namespace, a node whose plug is pulled
for a while (one that Ray has given up ends when it hears of that, and is started again, as a pod would be),
and target groups that do not see the draft worker. A client whose connection breaks sends its request again
with `Last-Event-ID`. Every stream is compared, token by token, with what the target alone generates in one
process without speculation.

A request is lost when its client is refused for good or has waited for `--patience` seconds. Recovery of a
fault is the time from the fault until every process is there again, weights loaded, and the door says so.

Each fault, with the streams that ended since the one before, is kept beside the results as soon as it is
over. A run that is interrupted writes the results of what has happened, and goes on behind it with --resume,
with a deployment of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from benchmarks.chaos_cluster import ChaosCluster, NoVictim, Shape
from benchmarks.interruption import end_on_sigterm
from benchmarks.kept_cells import KeptCells
from benchmarks.reconnecting import Reading, read_stream
from benchmarks.report import progress_bar, report_headlines, to_plain, write_results
from benchmarks.workload import read_prompts
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.proposers.config import SpeculativeConfig

_POLL_S = 0.2
_LONGEST_CLIENT_REST_S = 3.0
_SUPERVISION_S = 2.0
"""Between looks at whether nodes have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is done."""

    num_faults: int
    shape: Shape
    num_streams: int = 6
    """At a time."""
    num_requests: int = 24
    """Different ones; they are sent again and again."""
    max_tokens: int = 160
    recovery_limit_s: float = 180.0
    """The next fault does not wait longer for the end of the one before."""
    longest_rest_s: float = 2.0
    """Between a recovery and the next fault."""
    client_rest: float = 0.0
    """Of the time that a stream took, its client rests before the next one. Cores that all nodes share have
    some time for who starts again then."""
    seed: int = 1


FULL = Plan(num_faults=200, shape=Shape(tensor_parallel_size=2))
QUICK = Plan(
    num_faults=20,
    shape=Shape(lease_s=1.5, step_timeout_s=4.0, proxy_check_s=0.5, health_timeout_s=3.0),
    num_streams=4,
    num_requests=12,
    longest_rest_s=0.5,
    client_rest=1.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One that happened."""

    kind: str
    at_s: float
    """Since the beginning."""
    recovery_s: float | None
    """None: not in the time that it was given."""
    num_nodes_given_up: int = 0
    """By Ray, and started again when they knew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One that was read."""

    request: int
    began_s: float
    seconds: float
    is_lost: bool
    is_wrong: bool
    num_breaks: int
    num_error_events: int
    longest_pause_s: float
    refusal: str | None


def draw_requests(plan: Plan, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the bodies of different requests, every other one greedy."""
    random = Random(plan.seed)
    return [
        {
            "prompt": random.choice(prompts)[: random.randint(40, 300)],
            "temperature": float(number % 2),
            "seed": random.getrandbits(32),
            "max_tokens": random.randint(plan.max_tokens // 2, plan.max_tokens),
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        for number in range(plan.num_requests)
    ]


def draw_faults(kinds: Sequence[str], number: int, seed: int) -> list[str]:
    """Return what is done, in random order: every kind as often as any other, as far as the number allows."""
    random = Random(seed)
    drawn: list[str] = []
    while len(drawn) < number:
        drawn += random.sample(kinds, len(kinds))
    return drawn[:number]


def tokens_alone(config: EngineConfig, bodies: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return what the target generates in this process, without speculation."""
    plain = config.model_copy(
        update={
            "speculative_config": SpeculativeConfig(method="none"),
            "target": config.target.model_copy(update={"tensor_parallel_size": 1}),
        }
    )
    with Engine(plain) as engine:
        params = [
            SamplingParams(
                temperature=body["temperature"],
                seed=body["seed"],
                max_tokens=body["max_tokens"],
                ignore_eos=True,
            )
            for body in bodies
        ]
        results = engine.generate([body["prompt"] for body in bodies], params)
        return [list(result.token_ids) for result in results]


class Load:
    """Clients that read one stream after the other."""

    def __init__(
        self,
        url: str,
        bodies: Sequence[dict[str, Any]],
        expected: Sequence[list[int]],
        *,
        patience_s: float,
        rest: float,
    ) -> None:
        """`patience_s`: as `read_stream`; `rest`: see `Plan.client_rest`."""
        self._url = url
        self._bodies = bodies
        self._expected = expected
        self._patience_s = patience_s
        self._rest = rest
        self._numbers: Iterator[int] = itertools.cycle(range(len(bodies)))
        self.started_s = time.monotonic()
        self._is_over = False
        self.streams: list[Stream] = []

    async def run(self, num_clients: int) -> None:
        """Read until `end` is called, and then what has begun."""
        # No limit but patience: a server that is stopped and not dead answers with nothing at all.
        timeout = httpx.Timeout(10.0, read=30.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=self._url, timeout=timeout, limits=limits) as client:
            await asyncio.gather(*(self._client(client) for _ in range(num_clients)))

    def end(self) -> None:
        """Begin no more streams."""
        self._is_over = True

    async def _client(self, client: httpx.AsyncClient) -> None:
        while not self._is_over:
            number = next(self._numbers)
            began_s = time.monotonic()
            reading = Reading()
            await read_stream(
                client,
                "/v1/completions",
                self._bodies[number],
                patience_s=self._patience_s,
                reading=reading,
            )
            self.streams.append(
                Stream(
                    request=number,
                    began_s=began_s - self.started_s,
                    seconds=time.monotonic() - began_s,
                    is_lost=not reading.is_complete,
                    is_wrong=self._is_wrong(reading, self._expected[number]),
                    num_breaks=reading.num_breaks,
                    num_error_events=reading.num_error_events,
                    longest_pause_s=reading.longest_pause_s,
                    refusal=reading.refusal,
                )
            )
            await asyncio.sleep(min(self._rest * self.streams[-1].seconds, _LONGEST_CLIENT_REST_S))

    @staticmethod
    def _is_wrong(reading: Reading, expected: list[int]) -> bool:
        """Of a lost stream, what came of it must be right all the same."""
        if not reading.is_complete:
            return reading.token_ids != expected[: len(reading.token_ids)]
        return reading.token_ids != expected or reading.finish_reason != "length"


class NotRepaired(Exception):
    """What a fault before has broken is not there again: no harm can be done to it."""


class Trouble:
    """Does harm, one fault after the other, and waits until it is over."""

    def __init__(self, cluster: ChaosCluster, plan: Plan, started_s: float) -> None:
        """`started_s`: where faults count their time from."""
        self._cluster = cluster
        self._plan = plan
        self._started_s = started_s
        self._supervised_s = 0.0
        self._num_given_up = 0

    def happen(self, kind: str, number: int) -> Fault:
        """Have a fault of the plan happen; return when it is over.

        Raises:
            NotRepaired: there is nobody whom it could happen to, and nobody comes.
        """
        # One of its own for each: a run that goes on where it was cut does the same harm.
        random = Random(f"{self._plan.seed}-{number}")
        time.sleep(random.uniform(0.0, self._plan.longest_rest_s))
        self._num_given_up = 0
        began_s = self._harm(kind, random)
        return Fault(
            kind=kind,
            at_s=began_s - self._started_s,
            recovery_s=self._recover(began_s),
            num_nodes_given_up=self._num_given_up,
        )

    def _harm(self, kind: str, random: Random) -> float:
        """Do it; return when."""
        harm = self._cluster.faults()[kind]
        give_up_s = time.monotonic() + self._plan.recovery_limit_s
        while True:
            began_s = time.monotonic()
            try:
                harm(random)
                return began_s
            except NoVictim:  # of a fault before that has taken too long
                if began_s >= give_up_s:
                    raise NotRepaired(f"{kind}: nobody is there, and nobody has come") from None
                self._wait()

    def _recover(self, began_s: float) -> float | None:
        while (seconds := time.monotonic() - began_s) < self._plan.recovery_limit_s:
            if self._cluster.is_whole():
                return seconds
            self._wait()
        return None

    def _wait(self) -> None:
        """Do meanwhile what supervises nodes."""
        time.sleep(_POLL_S)
        if (now_s := time.monotonic()) - self._supervised_s >= _SUPERVISION_S:
            self._supervised_s = now_s
            self._num_given_up += self._cluster.start_ended_nodes()


def named_models(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration whose models are named by their folders, wherever these lay."""
    blocks = {block: config[block] for block in ("target", "speculative_config")}
    return config | {name: its | {"model": Path(its["model"]).name} for name, its in blocks.items()}


def p95(values: Sequence[float]) -> float:
    """Return the value that 95 % do not exceed (nearest rank)."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def summary_of(faults: Sequence[Fault], limit_s: float) -> dict[str, dict[str, float]]:
    """Return recovery by kind of fault. What did not recover counts with the limit."""
    seconds: dict[str, list[float]] = {}
    for fault in faults:
        seconds.setdefault(fault.kind, []).append(limit_s if fault.recovery_s is None else fault.recovery_s)
    return {
        kind: {"number": len(of_kind), "median_s": statistics.median(of_kind), "max_s": max(of_kind)}
        for kind, of_kind in sorted(seconds.items())
    }


class Record:
    """What has happened so far, in this run and in parts of it that were cut."""

    def __init__(self, kept: KeptCells, plan: Plan) -> None:
        self._kept = kept
        self._plan = plan

    @property
    def num_faults(self) -> int:
        """Faults that are over."""
        return self._count("fault")

    def keep_fault(self, fault: Fault, streams: Sequence[Stream]) -> None:
        """Write the next fault, and the streams that ended since the one before."""
        cell = f"fault {self.num_faults}"
        self._kept.keep(cell, {"fault": to_plain(fault), "streams": to_plain(streams)})

    def keep_rest(self, streams: Sequence[Stream]) -> None:
        """Write the streams that ended after the last fault of this part of the run."""
        self._kept.keep(f"rest {self._count('rest')}", {"streams": to_plain(streams)})

    def faults(self) -> list[Fault]:
        """Return all of them."""
        return [Fault(**cell["fault"]) for cell in self._cells("fault")]

    def streams(self) -> list[Stream]:
        """Return all of them."""
        cells = [*self._cells("fault"), *self._cells("rest")]
        return [Stream(**stream) for cell in cells for stream in cell["streams"]]

    def results(self, config: dict[str, Any], stopped_by: str | None) -> dict[str, Any]:
        """Return what the results file is to hold."""
        limit_s = self._plan.recovery_limit_s
        faults, streams = self.faults(), self.streams()
        recoveries = [limit_s if fault.recovery_s is None else fault.recovery_s for fault in faults]
        return {
            "plan": self._plan,
            "config": config,
            "stopped_by": stopped_by,
            "parts": self._parts(),
            "faults": faults,
            "recovery_by_kind": summary_of(faults, limit_s),
            "streams": streams,
            "num_streams": len(streams),
            "num_broken_connections": sum(stream.num_breaks for stream in streams),
            "num_error_events": sum(stream.num_error_events for stream in streams),
            "refusals": Counter(stream.refusal for stream in streams if stream.refusal),
            "headlines": {
                "faults": len(faults),
                "lost": sum(stream.is_lost for stream in streams),
                "wrong": sum(stream.is_wrong for stream in streams),
                "recovery_p95_s": p95(recoveries) if recoveries else 0.0,
            },
        }

    def _parts(self) -> list[dict[str, Any]]:
        """Return where and when faults were measured: a run that was cut is measured in parts."""
        parts: dict[str, dict[str, Any]] = {}
        for cell in self._cells("fault"):
            part = parts.setdefault(cell["measured"]["date"], {"measured": cell["measured"], "num_faults": 0})
            part["num_faults"] += 1
        return list(parts.values())

    def _count(self, what: str) -> int:
        return next(n for n in itertools.count() if not self._kept.is_kept(f"{what} {n}"))

    def _cells(self, what: str) -> list[dict[str, Any]]:
        return [self._kept.result(f"{what} {n}") for n in range(self._count(what))]


def torment(
    cluster: ChaosCluster, load: Load, plan: Plan, record: Record, tick: Callable[[str], None]
) -> None:
    """Do under load all harm that is left to do; return when the last stream has ended.

    Raises:
        NotRepaired: the deployment does not recover. What was done and read until then is in the record.
    """
    trouble = Trouble(cluster, plan, load.started_s)
    kinds = draw_faults(list(cluster.faults()), plan.num_faults, plan.seed)
    num_told = 0
    # The clients have a thread of their own, not the trouble: Ray starts nodes in the main thread only.
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: asyncio.run(load.run(plan.num_streams)))
        try:
            for number in range(record.num_faults, plan.num_faults):
                tick(kinds[number].replace("_", " "))
                fault = trouble.happen(kinds[number], number)
                streams = load.streams[num_told:]
                num_told += len(streams)
                record.keep_fault(fault, streams)
        finally:
            load.end()
            tick("waiting for the last streams")
            reading.result()
            record.keep_rest(load.streams[num_told:])


def main(
    quick: Annotated[bool, typer.Option(help="20 faults, with fast health checks.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write raw results here.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was cut, where it was.")
    ] = False,
    faults: Annotated[int | None, typer.Option(min=1, help="Number of faults.")] = None,
    patience: Annotated[float, typer.Option(help="Seconds without an event until a client gives up.")] = 300,
    family: Annotated[Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")] = Path(
        "models/demo"
    ),
) -> None:
    """Do harm to a running deployment at random, and compare every stream with the target alone.

    Example: python -m benchmarks.chaos --quick --json runs/chaos.json
    """
    end_on_sigterm()
    plan = QUICK if quick else FULL
    if faults is not None:
        plan = replace(plan, num_faults=faults)
    kept = KeptCells(json, to_plain(plan), resume=resume)
    record, stopped_by = Record(kept, plan), None
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(progress_bar())
        starting = progress.add_task("what the target generates alone", total=2)
        cluster = ChaosCluster(plan.shape, family)
        bodies = draw_requests(plan, read_prompts(family / "prompts.jsonl"))
        expected = tokens_alone(cluster.config.engine(), bodies)
        progress.update(starting, advance=1, description="starting the cluster")
        stack.enter_context(cluster)
        end_on_sigterm()  # again: Ray's own handler, which is there by now, ends the process at once
        progress.advance(starting)
        task = progress.add_task("faults", total=plan.num_faults)

        def tick(what: str) -> None:
            progress.update(task, completed=record.num_faults, description=what)

        try:
            load = Load(cluster.url, bodies, expected, patience_s=patience, rest=plan.client_rest)
            torment(cluster, load, plan, record, tick)
        except NotRepaired as error:
            stopped_by = str(error)
        except KeyboardInterrupt:
            stopped_by = "interrupted"
    results = record.results(named_models(cluster.config.model_dump(mode="json")), stopped_by)
    write_results(json, results)
    report_headlines(results["headlines"])
    if stopped_by is not None:
        Console(stderr=True).print(f"[red]stopped after {record.num_faults} faults: {stopped_by}[/red]")
        raise typer.Exit(1)
    kept.forget()


if __name__ == "__main__":
    typer.run(main)
