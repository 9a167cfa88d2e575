"""Pictures of the simulation for docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import new_figure, prepare_figures, save_figure


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write all pictures as SVG.

    Raises:
        UserError: matplotlib is not installed.
    """
    prepare_figures()
    return [
        save_figure(_scaling(results["scaling"]), folder / "simulate-scaling.svg"),
        save_figure(_pools(results["pools"]), folder / "simulate-pools.svg"),
        save_figure(_equal_devices(results["equal_devices"]), folder / "simulate-equal-devices.svg"),
        save_figure(_loads(results["loads"]), folder / "simulate-controller.svg"),
        save_figure(_failures(results), folder / "simulate-failures.svg"),
    ]


def _scaling(rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, (left, right) = new_figure(2)
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for axis, is_one_pool in ((left, False), (right, True)):
            own = [
                row["outcome"]
                for row in rows
                if row["kind"] == kind and (row["pools"] == 1) == is_one_pool and row["groups_per_pool"] > 1
            ]
            own.sort(key=lambda one: one.num_groups)
            if is_one_pool:
                axis.plot([one.num_groups for one in own], [one.goodput_per_group for one in own], "o-")
            else:
                gpus, total = [one.num_gpus for one in own], [one.goodput for one in own]
                axis.loglog(gpus, total, "o-", label=kind)
    left.set(xlabel="GPUs, in pools of 2 groups and a draft worker", ylabel="tokens/s")
    left.legend(frameon=False)
    right.set(xlabel="target groups that share one pool (2 per worker)", ylabel="tokens/s per group")
    right.set_ylim(bottom=0)
    return figure


def _pools(pools: Mapping[str, Any]) -> Any:
    figure, (left, right) = new_figure(2)
    rows = pools["rows"]
    for number, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
        own, colour = [row for row in rows if row["mode"] == mode], f"C{number}"
        left.scatter(
            [row["load"] for row in own], [row["workers"] for row in own], s=14, color=colour, label=mode
        )
        for row in own:
            shares = [one[0] / (row["load"] / pools["x"]) for one in row["measured"]]
            best = max(one[1] for one in row["measured"])
            values = [one[1] / best for one in row["measured"]]
            right.plot(shares, values, "-", color=colour, lw=0.5, alpha=0.6)
    loads = [min(row["load"] for row in rows), max(row["load"] for row in rows)]
    left.plot(loads, [load / pools["x"] for load in loads], "k--", lw=1, label=f"L / {pools['x']:.2f}")
    left.set(xscale="log", yscale="log", xlabel="load L by bare times", ylabel="workers per group needed")
    ticks = (0.2, 0.5, 1.0, 2.0)
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.minorticks_off()
    left.legend(frameon=False)
    right.axvline(1.0, color="k", ls="--", lw=1)
    right.set(
        xscale="log", xlabel="workers, of what the rule says", ylabel="goodput, of the best", ylim=(0, 1.05)
    )
    return figure


def _loads(rows: Sequence[Mapping[str, Any]]) -> Any:
    drafters = list(dict.fromkeys(row["drafter"] for row in rows))
    figure, axes = new_figure(len(drafters))
    for axis, drafter in zip(axes, drafters, strict=True):
        own = [row for row in rows if row["drafter"] == drafter]
        batches = [row["batch"] for row in own]
        plain = [row["goodput"]["plain"] for row in own]
        for name in own[0]["goodput"]:
            values = [row["goodput"][name] / base for row, base in zip(own, plain, strict=True)]
            axis.plot(batches, values, "-", color="0.75", lw=0.8)
        best = [row["goodput"][row["best_fixed"]] / base for row, base in zip(own, plain, strict=True)]
        axis.plot(batches, best, "k--", label="best fixed")
        axis.plot(batches, [row["controller_vs_plain"].median for row in own], "o-", label="controller")
        axis.set(xscale="log", xlabel=f"requests at a time, drafter {drafter}", ylabel="goodput over plain")
        axis.axhline(1.0, color="0.5", lw=0.8)
        axis.legend(frameon=False)
    return figure


def _equal_devices(rows: Sequence[Mapping[str, Any]]) -> Any:
    panels = list(dict.fromkeys((row["drafter"], row["trace"]) for row in rows))
    figure, axes = new_figure(len(panels))
    for axis, (drafter, trace) in zip(axes, panels, strict=True):
        own = [row for row in rows if (row["drafter"], row["trace"]) == (drafter, trace)]
        batches = [row["batch"] for row in own]
        axis.plot(batches, [row["colocated_vs_plain"] for row in own], "ko-", label="colocated")
        by_rule = [[one for one in row["apart"] if one["is_by_rule"]] for row in own]
        kinds = list(dict.fromkeys((one["mode"], one["width"]) for one in by_rule[0]))
        modes = list(dict.fromkeys(mode for mode, _ in kinds))
        for mode, width in kinds:
            values = [
                one["vs_plain"]
                for each in by_rule
                for one in each
                if (one["mode"], one["width"]) == (mode, width)
            ]
            style, colour = "-" if width == 1 else "--", f"C{modes.index(mode)}"
            label = f"{mode}, {width} GPU{'s' if width > 1 else ''}"
            axis.plot(batches, values, f"o{style}", color=colour, ms=3, lw=1, label=label)
        axis.set(
            xscale="log",
            xlabel=f"requests for every 8 GPUs, {trace}, drafter {drafter}",
            ylabel="goodput over plain",
        )
        axis.axhline(1.0, color="0.5", lw=0.8)
    axes[0].legend(frameon=False, fontsize=7)
    return figure


def _failures(results: Mapping[str, Any]) -> Any:
    figure, axes = new_figure(2)
    for axis, key, how in zip(
        axes, ("failures", "controlled_failures"), ("k fixed", "k controlled"), strict=True
    ):
        period_s = results[key]["period_s"]
        seconds = results[key]["tokens_by_second"][: int(7 * period_s)]
        axis.plot(range(len(seconds)), seconds, lw=1)
        for number in (1, 3, 5):
            axis.axvspan(number * period_s, (number + 1) * period_s, color="0.9")
        axis.set(xlabel=f"seconds, {how} (grey: somebody is dead)", ylabel="tokens/s", ylim=(0, None))
    return figure
