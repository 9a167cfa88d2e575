"""A run that was cut goes on: what was measured comes back as it was, and nothing else does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from benchmarks.kept_cells import KeptCells
from benchmarks.report import PairedRatio, Spread

SETTINGS = {"pairs": 6, "block_s": 0.5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    batch: int
    chance: float = 0.5


RESULT = {
    "vs_plain": PairedRatio((1.5, 1.6, 1.4)),
    "parts": {"plain_s": Spread((0.1, 0.2))},
    "tried": {"1": 3.0},
    "k": 4,
}


def test_what_was_measured_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "results" / "long.json"
    first = KeptCells(file, SETTINGS, resume=False)
    first.keep(Cell(batch=1), RESULT)
    again = KeptCells(file, SETTINGS, resume=True)
    assert again.is_kept(Cell(batch=1))
    assert not again.is_kept(Cell(batch=1, chance=0.8))
    result = again.result(Cell(batch=1))
    assert {name: result[name] for name in RESULT} == RESULT
    assert result["cell"] == Cell(batch=1)
    assert {"date", "commit", "processor"} <= result["measured"].keys()
    with pytest.raises(KeyError):
        again.result(Cell(batch=2))
    again.keep(Cell(batch=2), RESULT)
    assert KeptCells(file, SETTINGS, resume=True).is_kept(Cell(batch=2))
    again.forget()
    assert list(file.parent.iterdir()) == []


def test_a_line_that_was_cut_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    cells = KeptCells(file, SETTINGS, resume=False)
    cells.keep(Cell(batch=1), RESULT)
    cells.keep(Cell(batch=2), RESULT)
    (kept,) = tmp_path.iterdir()
    kept.write_text(kept.read_text()[:-40])
    again = KeptCells(file, SETTINGS, resume=True)
    assert again.is_kept(Cell(batch=1))
    assert not again.is_kept(Cell(batch=2))
    again.keep(Cell(batch=2), RESULT)
    assert KeptCells(file, SETTINGS, resume=True).is_kept(Cell(batch=2)), "the cut line spoils none after it"


def test_other_settings_are_another_run(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    KeptCells(file, SETTINGS, resume=False).keep(Cell(batch=1), RESULT)
    with pytest.raises(typer.BadParameter, match="other settings"):
        KeptCells(file, {**SETTINGS, "pairs": 5}, resume=True)
    assert not KeptCells(file, SETTINGS, resume=False).is_kept(Cell(batch=1)), (
        "without --resume it begins anew"
    )
    with pytest.raises(typer.BadParameter, match="--json"):
        KeptCells(None, SETTINGS, resume=True)
