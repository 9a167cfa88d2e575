"""The benchmark of verification that goes on from drafts runs both ways, and compares them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.exit_reuse import ANEW, RESUMED, Plan, Steps, headlines_of, measure, targets_of
from specdec.model.exit_states import ExitStates
from tests.architectures import save_model

pytestmark = pytest.mark.usefixtures("one_thread")


PLAN = Plan(exit_layer=1, batches=(1, 3), context=20, rounds=2, seconds=0.001)


def test_every_batch_has_its_ratios(tmp_path: Path) -> None:
    save_model(tmp_path)
    ticks: list[None] = []
    cells = measure(tmp_path, PLAN, lambda: ticks.append(None))
    assert len(ticks) == 2 * 2 * 3
    assert [cell["batch"] for cell in cells] == [1, 3]
    for cell in cells:
        for seconds in (cell["step_s"], cell["verify_s"]):
            assert {name: len(each) for name, each in seconds.items()} == {ANEW: 2, RESUMED: 2}
        for name in (ANEW, RESUMED):
            assert all(
                verify < step
                for verify, step in zip(cell["verify_s"][name], cell["step_s"][name], strict=True)
            )
    names = {"tiny_step_ratio_b1", "tiny_verify_ratio_b3", "tiny_verify_ratio_b3_upper"}
    assert names <= set(headlines_of({"tiny": cells}))


def test_one_of_them_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    of, num_rows = ExitStates.of, 0

    def counted(states: ExitStates, slices: list[object]) -> object:
        nonlocal num_rows
        rows = of(states, slices)  # type: ignore[arg-type]
        num_rows += len(rows)
        return rows

    monkeypatch.setattr(ExitStates, "of", counted)
    spared = {}
    for name, target in targets_of(tmp_path, PLAN).items():
        num_rows = 0
        Steps(target, PLAN, 3).measure()
        spared[name] = num_rows
    assert spared[ANEW] == 0
    assert spared[RESUMED] >= 3 * 3 * (1 + PLAN.num_draft_tokens)
