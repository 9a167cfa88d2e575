from __future__ import annotations

import logging

import pytest

from specdec.core.clock import ManualClock
from specdec.core.idle_work import WorkProgress
from workers.progress import StartProgress


def compiling(done: int) -> WorkProgress:
    return WorkProgress(stage="packing weights", done=done, total=100)


def test_a_quick_start_is_told_but_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    with caplog.at_level(logging.INFO):
        progress = StartProgress("target", told.append, clock=ManualClock())
        progress("weights", 1, 4)
        progress("weights", 2, 4)
        progress.compiling(compiling(37))
        progress.ready()
    assert told == ["loading target 25 % (weights)", ""]
    assert not caplog.records


def test_a_slow_start_is_told_often_and_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    told: list[str] = []
    with caplog.at_level(logging.INFO):
        progress = StartProgress("draft", told.append, clock=clock)
        for second in range(5):
            progress.compiling(compiling(10 * second))
            clock.advance(1.0)
    assert told == [f"compiling draft {done} % (packing weights)" for done in (0, 10, 20, 30, 40)]
    assert [record.getMessage() for record in caplog.records] == [told[2], told[4]]


def test_nobody_need_listen() -> None:
    progress = StartProgress("draft", clock=ManualClock())
    progress("weights", 0, 0)
    progress.ready()
