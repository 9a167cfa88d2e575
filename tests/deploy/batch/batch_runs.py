"""A batch from a file of requests to a file of results, over a door in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from deploy.batch.lines import read_lines
from deploy.batch.results import ResultsFile
from deploy.batch.runner import BatchOptions, BatchRunner

OPTIONS = BatchOptions(concurrency=4, patience_s=20.0)


def request(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": "abc", **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(file: Path, *lines: object) -> Path:
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def results_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class Waits:
    """A sleep that takes no time, and what it was asked for."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(0)


def run(
    transport: httpx.AsyncBaseTransport,
    requests: Path,
    results: Path,
    *,
    options: BatchOptions = OPTIONS,
    drop_failures: bool = False,
    is_gone: Callable[[], bool] = lambda: False,
) -> Waits:
    waits = Waits()

    async def go() -> None:
        with ResultsFile(results, drop_failures=drop_failures) as file:
            async with httpx.AsyncClient(transport=transport, base_url="http://door") as client:
                runner = BatchRunner(client, file, options, sleep=waits, is_gone=is_gone)
                await runner.run(read_lines(requests), lambda result: None)

    asyncio.run(go())
    return waits
