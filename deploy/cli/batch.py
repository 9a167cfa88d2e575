"""`drafthouse batch`: answer a file of requests into another file, on a server or in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deploy.batch.lines import num_lines, read_lines
from deploy.batch.results import BatchResult, ResultsFile
from deploy.batch.runner import BatchOptions, BatchRunner
from deploy.cli.border import EXIT_FAILED
from deploy.cli.endpoint import API_KEY_VARIABLE, authorization, base_url
from deploy.cli.progress import as_typed, shown
from deploy.loopback import direct_mounts
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
    served_model_name: str | None
    """What requests call the model of `engine`; None: by its folder."""
    takes_model_defaults: bool
    """Of `engine`: whether requests that do not say how they are sampled are as its checkpoint says."""
    api_key: str | None
    options: BatchOptions
    timeout_s: float
    """Longest time for one request."""
    are_failures_retried: bool


def run_batch(command: BatchCommand) -> None:
    """Answer what is not answered yet.

    Raises:
        UserError: something that was given is wrong; nothing has been sent.
        BatchInterrupted: the server was away for too long.
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
    async with _client(command, console) as client:
        runner = BatchRunner(client, results, command.options)
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
async def _client(command: BatchCommand, console: Console) -> AsyncIterator[httpx.AsyncClient]:
    """Connect to the server, or start the engine."""
    if command.engine is not None:
        async with _engine_client(command, command.engine, console) as client:
            yield client
        return
    assert command.url is not None
    url = base_url(command.url)
    async with httpx.AsyncClient(
        base_url=url,
        headers=authorization(command.api_key),
        timeout=httpx.Timeout(_CONNECT_S, read=command.timeout_s, pool=None),
        limits=httpx.Limits(max_connections=command.options.concurrency),
        mounts=direct_mounts(url),
    ) as client:
        await _check(client, url)
        yield client


async def _check(client: httpx.AsyncClient, url: str) -> None:
    """Find out before the first line whether anybody is there who accepts the key."""
    try:
        response = await client.get("/v1/models", timeout=_CONNECT_S)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise UserError(
            f"nothing answers at {url} ({str(error) or type(error).__name__}): start a server with "
            "`drafthouse serve`, give the --url of one that runs, or --config FILE to run the engine here"
        ) from None
    if response.status_code in (401, 403):
        raise UserError(f"{url} does not accept the API key: give --api-key, or set {API_KEY_VARIABLE}")


@asynccontextmanager
async def _engine_client(
    command: BatchCommand, config: EngineConfig, console: Console
) -> AsyncIterator[httpx.AsyncClient]:
    """Start an engine in this process, and talk to the same application as over HTTP."""
    with shown(console, f"loading {as_typed(config.target.model)}") as show:
        from deploy.openai.app import create_app
        from deploy.openai.settings import DoorSettings
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
        settings = DoorSettings(
            served_model_name=command.served_model_name, takes_model_defaults=command.takes_model_defaults
        )
        transport = httpx.ASGITransport(create_app(service, settings, tokenizer))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None) as client:
            yield client
    finally:
        await asyncio.to_thread(service.close)
