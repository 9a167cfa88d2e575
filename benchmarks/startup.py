"""How long `drafthouse serve` takes until it is healthy, and to come back from the loss of its target worker.

    python -m benchmarks.startup --json benchmarks/results/startup.json      # about three minutes
    python -m benchmarks.startup --quick                                     # about a minute

Cold: the folder of compiled kernels is empty, so they are built. Warm: they are there. Files are in the
operating system's cache both times. A start ends when `/health` says 200; the metrics then tell whether the
forwards are compiled. A restart is what a client waits that asks right after `kill -9` of the target worker.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
from rich.console import Console

from benchmarks.compile_states import compile_states, wait_compiled
from benchmarks.report import Spread, report_headlines, write_results
from benchmarks.served import ServedProcess, serving
from deploy.config_file import load_config

CONFIGS = (Path("configs/demo.yaml"), Path("configs/demo-bf16.yaml"))
_TOO_LONG_S = 240.0
_NEWS_S = 20.0
"""By when a restarted worker must be known to be compiled: that news takes a second or two."""
_TARGET_WORKER = "ray::TargetWorkerProcess"


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of the server."""

    config: str
    is_cold: bool
    ready_s: float
    """Until `/health` said 200."""
    compile_states: dict[str, str]
    """Of target and draft, at that moment."""
    restart_s: float
    """From the end of the target worker to the answer to a request sent right afterwards."""
    log: tuple[tuple[float, str], ...]
    """What the command said, by seconds."""


def complete(server: ServedProcess) -> None:
    """Wait for the answer to a small request."""
    body = {"model": "drafthouse-demo", "prompt": "def ", "max_tokens": 4, "temperature": 0}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=_TOO_LONG_S).raise_for_status()


def kill_target(server: ServedProcess) -> None:
    """As the kernel does when memory is short."""
    for process in psutil.Process(server.process.pid).children(recursive=True):
        if process.cmdline()[:1] == [_TARGET_WORKER]:
            process.kill()
            return
    raise RuntimeError(f"no process {_TARGET_WORKER} below the server")


def measure(config: Path, cache: Path, *, is_cold: bool) -> Start:
    """Start, look, lose the target worker, stop."""
    if is_cold:
        shutil.rmtree(cache, ignore_errors=True)
    with serving(_with_cache(config, cache)) as server:
        server.wait_healthy()
        ready_s = time.monotonic() - server.started_s
        states = compile_states(server.url)
        complete(server)
        kill_target(server)
        killed_s = time.monotonic()
        complete(server)
        restart_s = time.monotonic() - killed_s
        wait_compiled(server.url, _NEWS_S)
    return Start(
        config=config.name,
        is_cold=is_cold,
        ready_s=ready_s,
        compile_states=states,
        restart_s=restart_s,
        log=tuple(server.log),
    )


def ready_seconds(config: Path, cache: Path) -> float:
    """Start the server with this folder of compiled kernels, stop it; return seconds until it was healthy."""
    with serving(_with_cache(config, cache)) as server:
        server.wait_healthy()
        return time.monotonic() - server.started_s


def _with_cache(config: Path, cache: Path) -> dict[str, Any]:
    """Return the configuration with a cache folder of ours."""
    values = load_config(config).model_dump(mode="json", exclude_unset=True)
    for block in ("target", "speculative_config"):
        values[block].setdefault("compile", {})["cache_dir"] = str(cache)
    return values


def headlines(starts: list[Start]) -> dict[str, float]:
    """Medians over all configurations measured."""
    cold = [start.ready_s for start in starts if start.is_cold]
    warm = [start.ready_s for start in starts if not start.is_cold]
    return {
        "ready_seconds_cold": Spread(tuple(cold)).median,
        "ready_seconds_warm": Spread(tuple(warm)).median,
        "restart_seconds": Spread(tuple(start.restart_s for start in starts)).median,
    }


def main(
    quick: Annotated[bool, typer.Option(help="demo.yaml once cold and once warm.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
    config: Annotated[list[Path] | None, typer.Option(help="Only these configurations.")] = None,
    warm_starts: Annotated[int, typer.Option(min=1, help="Warm starts per configuration.")] = 2,
) -> None:
    """Measure starts of `drafthouse serve`, cold and warm, and the loss of its target worker.

    Example: python -m benchmarks.startup --quick --json runs/startup.json
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    starts: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="drafthouse-kernels-") as folder:
        for file in config or (CONFIGS[:1] if quick else CONFIGS):
            for number in range(2 if quick else 1 + warm_starts):
                start = measure(file, Path(folder) / "cache", is_cold=number == 0)
                starts.append(start)
                kind = "cold" if start.is_cold else "warm"
                console.print(
                    f"{start.config} {kind}: ready after {start.ready_s:.1f} s {start.compile_states}, "
                    f"target back after {start.restart_s:.1f} s"
                )
    numbers = headlines(starts)
    write_results(json_file, {"starts": starts, "headlines": numbers})
    report_headlines(numbers)


if __name__ == "__main__":
    typer.run(main)
