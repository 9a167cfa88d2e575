from __future__ import annotations

from specdec.core.clock import ManualClock
from workers.idle_runner import IdleRunner


class Pieces:
    def __init__(self, num: int) -> None:
        self.left = num

    def pending(self) -> bool:
        return self.left > 0

    def run_next(self) -> None:
        self.left -= 1


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
