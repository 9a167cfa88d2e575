"""Progress of a recipe: a bar with the remaining time, and one JSON line per few steps in a file."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

console = Console(stderr=True)


class TrainingLog:
    """Context manager around a training loop; ``record`` once per finished step."""

    def __init__(self, name: str, path: Path, *, first: int, total: int, every: int = 10) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._every = every
        self._sums: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._count = 0
        self._since = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[losses]}"),
            console=console,
        )
        self._task = self._progress.add_task(name, total=total, completed=first, losses="")

    def __enter__(self) -> TrainingLog:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def record(self, step: int, values: dict[str, float]) -> None:
        """Count one step; every few steps write the mean of ``values`` and the seconds per step."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] += 1
        self._count += 1
        self._progress.advance(self._task)
        if self._count < self._every:
            return
        now = time.monotonic()
        means = {name: round(total / self._counts[name], 4) for name, total in self._sums.items()}
        line = {"step": step + 1, **means, "s_per_step": round((now - self._since) / self._count, 4)}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        shown = " ".join(f"{name} {value:.3f}" for name, value in means.items())
        self._progress.update(self._task, losses=shown)
        self._sums, self._counts, self._count, self._since = {}, Counter(), 0, now
