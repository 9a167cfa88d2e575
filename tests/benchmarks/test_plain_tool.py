"""One command line for the benchmarks that have nothing to choose but how much."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import head_recipes, hit_rates, lookahead_acceptance, online_learning, tree_acceptance
from benchmarks.plain_tool import PlainTool

TOOLS: dict[str, PlainTool[Any]] = {
    tool.module: tool
    for tool in (
        head_recipes.TOOL,
        hit_rates.TOOL,
        lookahead_acceptance.TOOL,
        online_learning.TOOL,
        tree_acceptance.TOOL,
    )
}


def run(plan: int, models: Path) -> Mapping[str, Any]:
    return {"plan": plan, "models": str(models)}


def headlines(results: Mapping[str, Any]) -> Mapping[str, float]:
    return {"twice": 2.0 * results["plan"]}


def call(monkeypatch: pytest.MonkeyPatch, tool: PlainTool[Any], *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["tool", *arguments])
    with pytest.raises(SystemExit) as end:
        tool.main()
    assert end.value.code == 0


@pytest.mark.parametrize(("arguments", "plan"), [((), 9), (("--quick",), 1)])
def test_a_plan_is_run_written_and_summed_up(
    arguments: tuple[str, ...],
    plan: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tool = PlainTool(module="a_tool", summary="Do it.", full=9, quick=1, run=run, headlines=headlines)
    file = tmp_path / "results.json"
    call(monkeypatch, tool, *arguments, "--json", str(file), "--models", "here")
    written = json.loads(file.read_text())
    assert (written["plan"], written["models"]) == (plan, "here")
    assert written["headlines"] == {"twice": 2.0 * plan}
    assert {"commit", "date"} <= written["environment"].keys()
    assert f"headline: twice {2.0 * plan:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize("module", TOOLS)
def test_the_tools_say_what_they_are(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = TOOLS[module]
    assert sys.modules[f"benchmarks.{module}"].__dict__["TOOL"] is tool
    assert tool.quick != tool.full
    call(monkeypatch, tool, "--help")
    said = " ".join(capsys.readouterr().out.split())
    assert tool.summary in said
    assert f"python -m benchmarks.{module} --quick" in said
