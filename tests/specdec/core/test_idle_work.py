from __future__ import annotations

from dataclasses import dataclass

import pytest

from specdec.core.idle_work import WorkProgress, WorkState, state_of


@dataclass
class Work:
    state: WorkState

    def progress(self) -> WorkProgress:
        return WorkProgress(stage="", done=0, total=1)

    def pending(self) -> bool:
        return self.state == "pending"

    def run_next(self) -> None: ...


@pytest.mark.parametrize(
    ("states", "together"),
    [
        ([], "ready"),
        (["ready", "ready"], "ready"),
        (["ready", "off"], "off"),
        (["failed", "off", "ready"], "failed"),
        (["ready", "failed", "pending"], "pending"),
    ],
)
def test_of_several_works_the_least_settled_counts(states: list[WorkState], together: WorkState) -> None:
    assert state_of([Work(state) for state in states]) == together
