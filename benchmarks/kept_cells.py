"""Cells of a long run, written as soon as they are measured: a run that was cut goes on where it was.

They lie beside the results, in `NAME.cells.jsonl`, one line each, until the run is at its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from benchmarks.report import PairedRatio, Spread, environment, to_plain

_KINDS: Mapping[str, type[PairedRatio | Spread]] = {"paired ratio": PairedRatio, "spread": Spread}


class KeptCells:
    """What was measured so far, by cell; each with when, where and at which commit."""

    def __init__(self, results: Path | None, settings: Mapping[str, Any], *, resume: bool) -> None:
        """Begin a run, or go on with one.

        Args:
            results: file that the results go to; None: nothing is kept.
            settings: what has to be the same in all parts of a run.
            resume: whether to go on with what is kept; else that is forgotten.

        Raises:
            typer.BadParameter: what is kept was measured with other settings, or there is nowhere to look.
        """
        if resume and results is None:
            raise typer.BadParameter("--resume goes on with what lies beside --json FILE: give that too")
        self._path = None if results is None else results.with_suffix(".cells.jsonl")
        self._settings = to_plain(settings)
        self._kept: dict[str, dict[str, Any]] = {}
        if self._path is None:
            return
        if resume and self._path.exists():
            self._read(self._path)
        else:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"settings": self._settings}) + "\n")

    def is_kept(self, cell: object) -> bool:
        """Whether a cell was measured already."""
        return _key(cell) in self._kept

    def keep(self, cell: object, result: Mapping[str, Any]) -> None:
        """Write what a cell has brought."""
        kept = self._kept[_key(cell)] = {**result, "measured": environment()}
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"key": _key(cell), "result": _tagged(kept)}) + "\n")

    def result(self, cell: object) -> dict[str, Any]:
        """Return what a cell has brought.

        Raises:
            KeyError: it was not measured.
        """
        return {"cell": cell, **self._kept[_key(cell)]}

    def forget(self) -> None:
        """The run is at its end, and its results are written."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _read(self, path: Path) -> None:
        first, *lines = path.read_text().splitlines()
        if json.loads(first)["settings"] != json.loads(json.dumps(self._settings)):
            raise typer.BadParameter(f"{path} holds cells measured with other settings: run without --resume")
        for line in lines:
            try:
                read = json.loads(line)
            except ValueError:  # the run was cut while it wrote
                lines.remove(line)
                break
            self._kept[read["key"]] = _untagged(read["result"])
        path.write_text("\n".join((first, *lines)) + "\n")


def _key(cell: object) -> str:
    return json.dumps(to_plain(cell), sort_keys=True)


def _tagged(value: Any) -> Any:
    """Make JSON of measurements that `_untagged` makes the same measurements of."""
    if isinstance(value, PairedRatio | Spread):
        kind = "paired ratio" if isinstance(value, PairedRatio) else "spread"
        return {"kind": kind, "values": list(value.values)}
    if isinstance(value, Mapping):
        return {str(key): _tagged(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_tagged(item) for item in value]
    return to_plain(value)


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"kind", "values"}:
        return _KINDS[value["kind"]](tuple(value["values"]))
    return {key: _untagged(item) for key, item in value.items()}
