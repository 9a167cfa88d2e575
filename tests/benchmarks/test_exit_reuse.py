"""The benchmark of verification that goes on from drafts runs both ways, and compares them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.exit_reuse import ANEW, RESUMED, Plan, Steps, headlines, measure, targets_of
from specdec.model.exit_states import ExitStates
from tests.architectures import save_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    save_model(tmp_path)
    return Plan(target=tmp_path, exit_layer=1, batches=(1, 3), context=20, rounds=2, seconds=0.001)


def test_every_batch_has_its_ratios(plan: Plan) -> None:
    results = measure(plan)
    assert [cell["batch"] for cell in results["cells"]] == [1, 3]
    for cell in results["cells"]:
        for seconds in (cell["step_s"], cell["verify_s"]):
            assert {name: len(each) for name, each in seconds.items()} == {ANEW: 2, RESUMED: 2}
        for name in (ANEW, RESUMED):
            assert all(
                verify < step
                for verify, step in zip(cell["verify_s"][name], cell["step_s"][name], strict=True)
            )
    assert {"step_ratio_b1", "verify_ratio_b3", "verify_ratio_b3_upper"} <= set(headlines(results))


def test_one_of_them_goes_on(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    of, num_rows = ExitStates.of, 0

    def counted(states: ExitStates, slices: list[object]) -> object:
        nonlocal num_rows
        rows = of(states, slices)  # type: ignore[arg-type]
        num_rows += len(rows)
        return rows

    monkeypatch.setattr(ExitStates, "of", counted)
    spared = {}
    for name, target in targets_of(plan).items():
        num_rows = 0
        Steps(target, plan, 3).measure()
        spared[name] = num_rows
    assert spared[ANEW] == 0
    assert spared[RESUMED] >= 3 * 3 * (1 + plan.num_draft_tokens)
