"""How a benchmark runs, records and reports: paired rounds, environment, raw JSON, headline lines."""

from __future__ import annotations

import json
import math
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated measurements of one quantity."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The number to quote."""
        return statistics.median(self.values)

    def summary(self) -> dict[str, Any]:
        """Median, extremes, count and the values themselves."""
        return {
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "n": len(self.values),
            "values": list(self.values),
        }


_T_95 = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812),
    *(1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725),
)
"""Student's t: 95 % of it lies below, for 1 to 20 degrees of freedom."""


def mean_bound(values: Sequence[float], sign: float) -> float:
    """Return what the true mean is below (sign 1) or above (-1) with 95 % confidence; values are normal."""
    if len(values) < 2:
        return math.inf * sign
    t = _T_95[min(len(values) - 1, len(_T_95)) - 1]
    return statistics.mean(values) + sign * t * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """Ratios of measurements that were taken in pairs, one beside the other."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.values)

    @property
    def lower(self) -> float:
        """The true ratio is above this with 95 % confidence, if logarithms are normal."""
        return self._bound(-1.0)

    @property
    def upper(self) -> float:
        """The true ratio is below this with 95 % confidence, if logarithms are normal."""
        return self._bound(1.0)

    def _bound(self, sign: float) -> float:
        return math.exp(mean_bound([math.log(value) for value in self.values], sign))

    def summary(self) -> dict[str, Any]:
        """Median, both bounds and the ratios themselves."""
        return {
            "median": self.median,
            "lower": self.lower,
            "upper": self.upper,
            "values": list(self.values),
        }


@dataclass(slots=True)
class Paired:
    """Seconds of several variants, measured in turn so that drift of the machine hits all alike."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def spread(self, name: str) -> Spread:
        """Seconds of one variant."""
        return Spread(tuple(self.seconds[name]))

    def ratio(self, slow: str, fast: str) -> Spread:
        """How many times faster `fast` is than `slow`, round by round."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        return Spread(tuple(a / b for a, b in pairs))


def run_paired(variants: Mapping[str, Callable[[], object]], rounds: int, tick: Callable[[], None]) -> Paired:
    """Run every variant once unmeasured, then `rounds` times in alternating order (ABBA)."""
    return run_in_turn({name: partial(_seconds_of, run) for name, run in variants.items()}, rounds, tick)


def run_in_turn(variants: Mapping[str, Callable[[], float]], rounds: int, tick: Callable[[], None]) -> Paired:
    """As `run_paired`, for variants that return the seconds they took."""
    paired = Paired({name: [] for name in variants})
    for run in variants.values():
        run()
        tick()
    for number in range(rounds):
        order = list(variants)[:: 1 if number % 2 == 0 else -1]
        for name in order:
            paired.seconds[name].append(variants[name]())
            tick()
    return paired


def _seconds_of(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s


def _git(*arguments: str) -> str:
    """Return what git says; nothing where it is not installed, as on machines that are lent for a GPU."""
    try:
        result = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return result.stdout.strip()


_AT_START: Mapping[str, Any] = {
    "date": datetime.now(UTC).isoformat(timespec="seconds"),
    "commit": _git("rev-parse", "HEAD"),
    "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
}
"""Taken when a benchmark starts: an hour later other code may lie there than what was measured."""


def environment() -> dict[str, Any]:
    """What the numbers were measured on, and when that began."""
    return {
        **_AT_START,
        "processor": _processor(),
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def to_plain(value: Any) -> Any:
    """JSON-ready form of nested dataclasses, spreads and paths."""
    if isinstance(value, Spread | PairedRatio):
        return value.summary()
    if isinstance(value, Paired):
        return value.seconds
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return to_plain(asdict(value))
    return str(value) if isinstance(value, Path) else value


def write_results(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write raw results with their environment as JSON; nothing when no file was asked for."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **to_plain(results)}, indent=1) + "\n")


def progress_bar(console: Console | None = None) -> Progress:
    """Return how benchmarks show how far they are, on stderr unless another console is given."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console or Console(stderr=True))


def report_headlines(headlines: Mapping[str, float]) -> None:
    """End the output with one `headline: NAME VALUE` line each."""
    console = Console(highlight=False, soft_wrap=True)
    for name, value in headlines.items():
        console.print(f"headline: {name} {value:.3f}")
