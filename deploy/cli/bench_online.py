"""`drafthouse bench online`: send the load, show a table, write JSON, CSV and a picture."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import typer
from pydantic_core import from_json
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from deploy.batch.answers import is_passing, is_without_route
from deploy.cli.border import EXIT_FAILED
from deploy.cli.endpoint import API_KEY_VARIABLE, authorization, base_url, not_reached
from deploy.cli.output_file import check_output
from deploy.load.arrivals import Arrival, Length
from deploy.load.client import load_client
from deploy.load.generator import LoadGenerator, Timeline
from deploy.load.plot import check_plot, draw
from deploy.load.report import PERCENTILES, Latency, LoadReport, csv_of, report_of
from deploy.load.workload import PATHS, Endpoint, Workload
from specdec.core.errors import ConfigError, NotReadyError, UserError

_CONNECT_S = 10.0
_PIPE_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Files to be written beside the table."""

    json: Path | None
    csv: Path | None
    plot: Path | None

    def check(self) -> None:
        """Refuse before measuring, not after, what cannot be written.

        Raises:
            ConfigError: naming option and file.
        """
        options: dict[Path, str] = {}
        for option, file in (("--json", self.json), ("--csv", self.csv), ("--plot", self.plot)):
            if file is None:
                continue
            check_output(option, file)
            other = options.setdefault(file.resolve(), option)
            if other != option:
                raise ConfigError(f"{option}: {file} is the file of {other}: give another one")
        if self.plot is not None:
            check_plot(self.plot)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineOptions:
    """The command line."""

    url: str
    api_key: str | None
    is_any_certificate_taken: bool
    endpoint: Endpoint
    model: str | None
    """None: the first of /v1/models."""
    arrivals: Sequence[Arrival]
    prompts: Sequence[str]
    prompt_length: Length
    output_length: Length
    vocab_size: int | None
    seed: int
    extra: Mapping[str, Any]
    objectives: Mapping[Latency, float]
    timeout_s: float
    outputs: Outputs
    described: Mapping[str, Any]
    """The options as they were typed, for the JSON."""


def extra_fields(text: str | None) -> dict[str, Any]:
    """Return the fields of a JSON object.

    Raises:
        ConfigError: it is none.
    """
    try:
        fields = from_json(text or "{}", allow_inf_nan=False)
        json.dumps(fields, allow_nan=False)  # 1e999 is read, as infinity, and could not be sent
    except ValueError as error:
        raise ConfigError(f"--extra-body: is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError('--extra-body: must be a JSON object, such as {"temperature": 0}')
    return fields


def run_online(options: OnlineOptions) -> None:
    """Measure, and say what came out; after Ctrl-C, what has come out so far.

    Raises:
        UserError: something that was given is wrong; nothing has been measured.
        NotReadyError: the server has no model yet; nothing has been measured.
        typer.Exit: with code 1, when no request was complete.
    """
    options.outputs.check()
    console = Console(stderr=True, highlight=False)
    ended: list[Timeline] = []
    try:
        asyncio.run(_measure(options, console, ended.append))
    except KeyboardInterrupt:
        if not ended:
            raise
        console.print(
            f"interrupted: of {len(options.arrivals)} requests, those that had ended", soft_wrap=True
        )
        _report(options, ended)
        raise
    if not _report(options, ended).num_completed:
        raise typer.Exit(EXIT_FAILED)


def _report(options: OnlineOptions, ended: list[Timeline]) -> LoadReport:
    """Say what came out of the requests that have ended, and write it where it is asked for."""
    timelines = sorted(ended, key=lambda timeline: timeline.due_s)
    report = report_of(timelines, options.objectives)
    # A pipe or a file has no width of its own.
    out = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    out.print(_summary(report), soft_wrap=True)
    out.print(_table(report))
    _write(options, report, timelines)
    return report


async def _measure(options: OnlineOptions, console: Console, on_end: Callable[[Timeline], None]) -> None:
    url = base_url(options.url)
    client = load_client(
        url,
        headers=authorization(options.api_key),
        connect_s=_CONNECT_S,
        read_s=options.timeout_s,
        is_any_certificate_taken=options.is_any_certificate_taken,
    )
    async with client:
        workload = Workload(
            endpoint=options.endpoint,
            model=await _model(client, url, options.model),
            prompts=options.prompts,
            prompt_length=options.prompt_length,
            output_length=options.output_length,
            vocab_size=options.vocab_size,
            seed=options.seed,
            extra=options.extra,
        )
        planned = workload.plan(options.arrivals)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(f"{len(planned)} requests to {url}", total=len(planned))

            def ended(timeline: Timeline) -> None:
                on_end(timeline)
                progress.advance(task)

            await LoadGenerator(client, PATHS[options.endpoint]).run(planned, ended)


async def _model(client: httpx.AsyncClient, url: str, given: str | None) -> str:
    """Find out who is there, and which model to ask for.

    Raises:
        UserError: nobody answers, its certificate is not trusted, the key is not right, or it has no list.
        NotReadyError: it has nothing to list yet.
    """
    try:
        response = await client.get("/v1/models", timeout=_CONNECT_S)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise not_reached(url, error, "give the URL of a server that runs") from None
    status = response.status_code
    if status in (401, 403):
        raise UserError(f"{url} does not accept the API key: give --api-key, or set {API_KEY_VARIABLE}")
    if given is not None:
        return given
    if is_without_route(response) or (status != httpx.codes.NOT_FOUND and is_passing(response)):
        raise NotReadyError(f"{url} is not ready yet (status {status}): try again a while later")
    try:
        models = response.json()["data"]
        if models == []:
            raise NotReadyError(f"{url} is not ready yet: no model is loaded; try again a while later")
        return str(models[0]["id"])
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{url}/v1/models names no model (status {status}): give --model") from None


def _summary(report: LoadReport) -> str:
    lines = [
        f"{report.num_completed} of {report.num_requests} requests complete in {report.duration_s:.1f} s: "
        f"{report.offered_per_s:.2f} requests/s offered, {report.completed_per_s:.2f} complete, "
        f"{report.output_tokens_per_s:.1f} tokens/s "
        f"({report.num_prompt_tokens} prompt tokens, {report.num_output_tokens} generated)"
    ]
    for kind, number in sorted(report.errors.items()):
        reason = report.reasons.get(kind)
        lines.append(f"failed: {number} with {kind}" + (f", the first: {reason}" if reason else ""))
    if report.objectives:
        limits = ", ".join(f"{name} <= {limit:g} s" for name, limit in report.objectives.items())
        lines.append(
            f"goodput under {limits}: {report.goodput_per_s:.2f} requests/s, "
            f"{100 * report.good_share:.1f} % of all requests"
        )
    if report.max_lateness_s > 0.1:
        lines.append(
            f"warning: requests were sent up to {report.max_lateness_s:.2f} s late: this machine is too slow "
            "for the load (that time counts as latency)"
        )
    return "\n".join(lines)


def _table(report: LoadReport) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for header in ("ms", "mean", *(f"p{rank}" for rank in PERCENTILES), "max", "number"):
        table.add_column(header, justify="left" if header == "ms" else "right", no_wrap=True)
    for latency, found in report.latencies.items():
        numbers = (found.mean, *found.percentiles.values(), found.max)
        table.add_row(latency, *(f"{1e3 * number:.1f}" for number in numbers), str(found.number))
    return table


def _write(options: OnlineOptions, report: LoadReport, timelines: Sequence[Timeline]) -> None:
    outputs = options.outputs
    if outputs.json is not None:
        results = {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "options": options.described,
            "report": asdict(report),
            "requests": [asdict(timeline) for timeline in timelines],
        }
        _write_text("--json", outputs.json, json.dumps(results, indent=1) + "\n")
    if outputs.csv is not None:
        _write_text("--csv", outputs.csv, csv_of(timelines, options.objectives))
    if outputs.plot is not None:
        draw(timelines, options.objectives, outputs.plot)


def _write_text(option: str, file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: {file} cannot be written: {error.strerror}") from None
