"""The command line of benchmarks that have a quick plan and a full one, and nothing else to choose.

They count tokens on the demo pair: `run` measures what a plan says, `headlines` are its last lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import typer

from benchmarks.report import report_headlines, write_results

P = TypeVar("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTool(Generic[P]):
    """One such benchmark."""

    module: str
    """Its name behind `benchmarks.`."""
    summary: str
    """What it measures: the first line of `--help`."""
    full: P
    quick: P
    run: Callable[[P, Path], Mapping[str, Any]]
    """(plan, folder of the models) -> raw results."""
    headlines: Callable[[Mapping[str, Any]], Mapping[str, float]]

    def measure(self, *, quick: bool, json_file: Path | None, models: Path) -> None:
        """Measure, write what was found with its headlines, and end with these."""
        results = self.run(self.quick if quick else self.full, models)
        numbers = self.headlines(results)
        write_results(json_file, {**results, "headlines": numbers})
        report_headlines(numbers)

    def main(self) -> None:
        """Do what the command line says."""

        def command(
            quick: Annotated[bool, typer.Option(help="Little of everything.")] = False,
            json_file: Annotated[Path | None, typer.Option("--json", help="Write raw results here.")] = None,
            models: Annotated[
                Path, typer.Option(help="Folder with target/, draft/ and prompts.jsonl.")
            ] = Path("models/demo"),
        ) -> None:
            self.measure(quick=quick, json_file=json_file, models=models)

        file = self.module.replace("_", "-")
        example = f"Example: python -m benchmarks.{self.module} --quick --json runs/{file}.json"
        command.__doc__ = f"{self.summary}\n\n{example}"
        typer.run(command)
