from __future__ import annotations

from specdec.core.clock import ManualClock
from specdec.core.idle_work import WorkProgress, WorkState
from workers.idle_runner import IdleRunner, run_at_start


class Pieces:
    """Work of some pieces, each of which takes a second of `clock`."""

    def __init__(self, num: int, clock: ManualClock | None = None) -> None:
        self.num = self.left = num
        self.clock = clock

    @property
    def state(self) -> WorkState:
        return "pending" if self.left else "ready"

    def progress(self) -> WorkProgress:
        return WorkProgress(stage="piece", done=self.num - self.left, total=self.num)

    def pending(self) -> bool:
        return self.left > 0

    def run_next(self) -> None:
        self.left -= 1
        if self.clock is not None:
            self.clock.advance(1.0)


def test_pieces_are_done_only_after_silence_and_in_order() -> None:
    clock, first, second = ManualClock(), Pieces(1), Pieces(2)
    idle = IdleRunner([first, second], quiet_s=1.0, clock=clock)
    assert idle.patience_s is not None
    assert idle.patience_s > 0.0
    for _ in range(3):
        clock.advance(0.4)
        idle.after(was_served=True, is_needed=False)
    assert (first.left, second.left) == (1, 2)
    clock.advance(0.9)
    idle.after(was_served=False, is_needed=False)
    assert (first.left, second.left) == (1, 2)
    clock.advance(0.1)
    idle.after(was_served=False, is_needed=False)
    assert (first.left, second.left) == (0, 2)
    assert idle.patience_s == 0.0, "hundreds of small pieces must not wait for each other"
    idle.after(was_served=False, is_needed=False)
    idle.after(was_served=False, is_needed=False)
    assert second.left == 0
    assert idle.patience_s is None, "with nothing to do there is no reason to wake up"


def test_nothing_is_done_while_somebody_will_ask_again() -> None:
    clock, pieces = ManualClock(), Pieces(1)
    idle = IdleRunner([pieces], quiet_s=1.0, clock=clock)
    for _ in range(5):
        clock.advance(2.0)
        idle.after(was_served=False, is_needed=True)
    assert pieces.left == 1
    clock.advance(2.0)
    idle.after(was_served=False, is_needed=False)
    assert pieces.left == 0


def test_at_the_start_all_is_done_within_the_budget_and_the_rest_while_idle() -> None:
    clock = ManualClock()
    first, second = Pieces(2, clock), Pieces(3, clock)
    reports: list[WorkProgress] = []
    run_at_start([first, second], budget_s=3.5, report=reports.append, clock=clock)
    assert (first.left, second.left) == (0, 1)
    assert [(report.done, report.total) for report in reports] == [(0, 2), (1, 2), (0, 3), (1, 3)]
    idle = IdleRunner([first, second], quiet_s=1.0, clock=clock)
    clock.advance(1.0)
    idle.after(was_served=False, is_needed=False)
    assert second.left == 0


def test_without_a_budget_nothing_is_done_at_the_start() -> None:
    clock = ManualClock()
    pieces = Pieces(1, clock)
    run_at_start([pieces], budget_s=0.0, report=lambda report: None, clock=clock)
    assert pieces.left == 1
