"""`drafthouse batch`: answer a file of requests into another file, on a server or in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster.config import ClusterConfig
from deploy.batch.answers import is_json, not_of_a_server, obstacle
from deploy.batch.lines import num_lines, read_lines
from deploy.batch.results import BatchResult, ResultsFile
from deploy.batch.runner import BatchOptions, BatchRunner
from deploy.cli.border import EXIT_FAILED
from deploy.cli.endpoint import API_KEY_VARIABLE, authorization, base_url, not_reached
from deploy.cli.progress import as_typed, shown
from deploy.config import HttpConfig, ServedModel
from deploy.door_settings import door_settings
from deploy.loopback import direct_mounts
from deploy.openai.settings import DoorSettings
from specdec.core.errors import ConfigError, UserError
from specdec.engine.config import EngineConfig

_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCommand:
    """The command line."""

    requests: Path
    results: Path
    url: str | None
    """A server; None: `engine` in this process."""
    engine: EngineConfig | None
    http: HttpConfig
    """Of `engine`: names and limits as a server with this configuration has them."""
    api_key: str | None
    is_any_certificate_taken: bool
    options: BatchOptions
    timeout_s: float
    """Longest time for one request."""
    are_failures_retried: bool


def run_batch(command: BatchCommand) -> None:
    """Answer what is not answered yet.

    Raises:
        UserError: something that was given is wrong; nothing has been sent.
        BatchInterrupted: the server was away for too long, or cannot be used in this way any more.
        typer.Exit: with code 1, when a request of the batch has failed, now or in an earlier run.
    """
    console = Console(stderr=True, highlight=False)
    total = num_lines(command.requests)
    if command.results.exists() and command.results.samefile(command.requests):
        raise ConfigError(f"{command.results} is the file of the requests: give another one for the results")
    with ResultsFile(command.results, drop_failures=command.are_failures_retried) as results:
        if results.num_results:
            console.print(
                f"{results.num_results} of {total} are in {command.results} already", soft_wrap=True
            )
        try:
            asyncio.run(_run(command, results, total, console))
        except KeyboardInterrupt:
            console.print("interrupted: the same command goes on from here", soft_wrap=True)
            raise
        if results.num_failures:
            console.print(
                f"{results.num_failures} of {total} failed: see error in {command.results} (--retry-failed "
                "tries them again)",
                soft_wrap=True,
            )
            raise typer.Exit(EXIT_FAILED)


async def _run(command: BatchCommand, results: ResultsFile, total: int, console: Console) -> None:
    async with _runner(command, results, console) as runner:
        started_s, before = time.monotonic(), results.num_results
        with _progress_bar(console) as progress:
            task = progress.add_task("answered", total=total, completed=before)

            def show(result: BatchResult) -> None:
                progress.update(task, completed=results.num_results, description=_description(results))

            await runner.run(read_lines(command.requests), show)
        seconds = time.monotonic() - started_s
        console.print(
            f"{results.num_results - before} answered in {seconds:.1f} s, {runner.num_completion_tokens} "
            f"tokens ({runner.num_completion_tokens / seconds:.1f} tokens/s)",
            soft_wrap=True,
        )


def _description(results: ResultsFile) -> str:
    return f"answered ({results.num_failures} failed)" if results.num_failures else "answered"


def _progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


@asynccontextmanager
async def _runner(
    command: BatchCommand, results: ResultsFile, console: Console
) -> AsyncIterator[BatchRunner]:
    """Connect to the server, or start the engine."""
    if command.engine is not None:
        async with _engine_runner(command, command.engine, results, console) as runner:
            yield runner
        return
    assert command.url is not None
    url = base_url(command.url)
    async with httpx.AsyncClient(
        base_url=url,
        headers=authorization(command.api_key),
        timeout=httpx.Timeout(_CONNECT_S, read=command.timeout_s, pool=None),
        limits=httpx.Limits(max_connections=command.options.concurrency),
        verify=not command.is_any_certificate_taken,
        mounts=direct_mounts(url),
    ) as client:
        await _check(client, url)
        yield BatchRunner(client, results, command.options)


async def _check(client: httpx.AsyncClient, url: str) -> None:
    """Find out before the first line whether a server is there that accepts the key.

    It may be one that is being restarted (404 and 5xx of Ray's proxy): that is waited for, as later on.

    Raises:
        UserError: nobody answers, something else does, or its certificate or the key is not right.
    """
    try:
        response = await client.get("/v1/models", timeout=_CONNECT_S)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        advice = (
            "start a server with `drafthouse serve`, give the --url of one that runs, or --config FILE to "
            "run the engine here"
        )
        raise not_reached(url, error, advice) from None
    if response.status_code == 401 or (response.status_code == 403 and is_json(response)):
        raise UserError(f"{url} does not accept the API key: give --api-key, or set {API_KEY_VARIABLE}")
    why = obstacle(response)
    if why is None and response.is_success and not is_json(response, dict):
        why = not_of_a_server(response)
    is_unknown = response.status_code == httpx.codes.NOT_FOUND and is_json(response)
    if why is None and is_unknown and httpx.URL(url).path.strip("/"):
        why = "status 404: give the URL as it is before /v1"
    if why is not None:
        raise UserError(f"{url}/v1/models: {why}")


@asynccontextmanager
async def _engine_runner(
    command: BatchCommand, config: EngineConfig, results: ResultsFile, console: Console
) -> AsyncIterator[BatchRunner]:
    """Start an engine in this process, and talk to the same application as over HTTP."""
    with shown(console, f"loading {as_typed(config.target.model)}") as show:
        from deploy.openai.app import create_app
        from deploy.openai.tokenization import HuggingFaceTokenizer
        from specdec.engine.async_engine import AsyncEngine
        from specdec.engine.engine import Engine

        engine = Engine(config)
        show("compiling the forward (the first time takes half a minute)")
        engine.warm_up()
    service = AsyncEngine(engine)
    try:
        path = Path(config.target.model)
        tokenizer = HuggingFaceTokenizer.load(path, trust_remote_code=config.target.trust_remote_code)
        transport = httpx.ASGITransport(create_app(service, _settings(command, config), tokenizer))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None) as client:
            yield BatchRunner(client, results, command.options, is_gone=lambda: service.description() is None)
    finally:
        await asyncio.to_thread(service.close)


def _settings(command: BatchCommand, config: EngineConfig) -> DoorSettings:
    """Return the door's settings: as a server's, but for one engine, however many groups it would have."""
    model = ServedModel(name=command.http.served_model_name, engine=config, cluster=ClusterConfig())
    settings = door_settings(command.http, model)
    limits = (settings.request_timeout_s, command.timeout_s)
    return replace(settings, request_timeout_s=min(limit for limit in limits if limit is not None))
