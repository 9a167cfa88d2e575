"""A picture of a run: latencies as cumulative shares, and what happened when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deploy.load.generator import Timeline
from deploy.load.report import Latency, gaps_s, latency_of
from specdec.core.errors import ConfigError
from specdec.core.extras import how_to_install

_NUM_BARS = 40
"""Of the time axis."""
_TITLES: Mapping[Latency, str] = {
    "ttft": "until the first text",
    "itl": "between deliveries",
    "e2e": "until the end",
}


def draw(timelines: Sequence[Timeline], objectives: Mapping[Latency, float], file: Path) -> None:
    """Write a picture, in the format that the file's name ends in (.svg, .png, .pdf).

    Raises:
        ConfigError: matplotlib is not installed, or does not know the format.
    """
    require_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 3.2), layout="constrained")
    *axes, last = figure.subplots(1, len(_TITLES) + 1)
    for axis, (latency, title) in zip(axes, _TITLES.items(), strict=True):
        _cumulative(axis, _values(timelines, latency), title, objectives.get(latency))
    _over_time(last, timelines)
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: {file} cannot be written: {error}") from None


def check_plot(file: Path) -> None:
    """Refuse before measuring what cannot be drawn.

    Raises:
        ConfigError: matplotlib is not there, or draws no files of this kind.
    """
    require_plots()
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if file.suffix and file.suffix[1:].lower() not in kinds:
        ends = ", ".join(f".{kind}" for kind in sorted(kinds))
        raise ConfigError(f"--plot: the name of {file} has to end in one of {ends}")


def require_plots() -> None:
    """Find out before anything is measured whether pictures can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"--plot needs matplotlib: {how_to_install('train')}, or leave the option out"
        ) from None


def _values(timelines: Sequence[Timeline], latency: Latency) -> list[float]:
    completed = [timeline for timeline in timelines if timeline.error is None]
    if latency == "itl":
        return [gap for timeline in completed for gap in gaps_s(timeline)]
    found = (latency_of(timeline, latency) for timeline in completed)
    return [seconds for seconds in found if seconds is not None]


def _cumulative(axis: Any, seconds: Sequence[float], title: str, objective_s: float | None) -> None:
    axis.set(title=title, xlabel="s", ylim=(0, 1))
    if seconds:
        axis.step(np.sort(seconds), np.arange(1, len(seconds) + 1) / len(seconds), where="post")
    if objective_s is not None:
        axis.axvline(objective_s, color="tab:red", linestyle="--", linewidth=1)
    axis.grid(alpha=0.3)


def _over_time(axis: Any, timelines: Sequence[Timeline]) -> None:
    end_s = max(timeline.ended_s for timeline in timelines)
    edges = np.linspace(0.0, end_s or 1.0, _NUM_BARS + 1)
    width_s = edges[1] - edges[0]
    for label, times_s in (
        ("due", [timeline.due_s for timeline in timelines]),
        ("complete", [timeline.ended_s for timeline in timelines if timeline.error is None]),
        ("failed", [timeline.ended_s for timeline in timelines if timeline.error is not None]),
    ):
        if times_s:
            axis.stairs(np.histogram(times_s, edges)[0] / width_s, edges, label=label)
    axis.set(title="requests/s", xlabel="s")
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)
