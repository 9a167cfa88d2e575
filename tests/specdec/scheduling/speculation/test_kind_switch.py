"""When what is done changes, and when it does not."""

from __future__ import annotations

from typing import Any

from specdec.scheduling.speculation.goodput import Kind
from specdec.scheduling.speculation.kind_switch import KindSwitch


def switch_at_lockstep() -> KindSwitch:
    switch = KindSwitch(margin=0.1, dwell_rounds=16)
    assert switch.review(0, {"plain": 1.0, "lockstep": 2.0}, 4)
    assert switch.kind == "lockstep"
    return switch


def test_the_first_choice_is_no_switch() -> None:
    assert switch_at_lockstep().num_switches == 0


def test_only_something_better_by_the_margin_and_not_too_soon() -> None:
    switch = switch_at_lockstep()
    better, hardly = (
        {"plain": 1.0, "lockstep": 2.0, "draft_ahead": 2.3},
        {"lockstep": 2.0, "draft_ahead": 2.1},
    )
    assert not switch.review(15, better, 4)
    assert not switch.review(16, hardly, 4)
    assert switch.review(16, better, 4)
    assert (switch.kind, switch.switched_round, switch.num_switches) == ("draft_ahead", 16, 1)


def test_plain_decoding_that_is_clearly_better_has_no_patience() -> None:
    assert switch_at_lockstep().review(1, {"plain": 2.2, "lockstep": 2.0}, 4)


def test_one_way_to_draft_takes_another_ones_place_once_both_were_compared() -> None:
    """Unless it is clearly better: what is known of it is of another time."""
    better = {"plain": 1.0, "lockstep": 2.0, "ping_pong": 2.25}
    clearly = {**better, "ping_pong": 2.4}
    for rates, are_compared, is_switched in (
        (better, False, False),
        (better, True, True),
        (clearly, False, True),
        ({"plain": 2.25, "lockstep": 2.0}, False, True),
    ):
        switch = switch_at_lockstep()
        asked = []

        def tell(one: Kind, other: Kind, answer: bool = are_compared, asked: list[Any] = asked) -> bool:
            asked.append((one, other))
            return answer

        assert switch.review(16, rates, 4, tell) == is_switched
        assert asked in ([], [("lockstep", "ping_pong")])
    assert switch_at_lockstep().review(1, better, 8, lambda *_: False), "there are twice as many sequences"


def test_another_batch_has_no_patience_either() -> None:
    better = {"plain": 1.0, "lockstep": 2.0, "ping_pong": 3.0}
    assert not switch_at_lockstep().review(1, better, 5)
    assert switch_at_lockstep().review(1, better, 8)


def test_what_goes_back_and_forth_waits_longer_until_time_has_passed() -> None:
    switch = switch_at_lockstep()
    for now in range(16, 16 * 5, 16):
        best, other = ("plain", "lockstep") if switch.kind == "lockstep" else ("lockstep", "plain")
        if not switch.review(now, {best: 1.029, other: 1.0}, 4):
            break
    assert switch.num_switches < 4
    before = switch.num_switches
    switch.pass_time(1000.0)
    rates = {"plain": 1.0, "lockstep": 1.0, "draft_ahead": 2.0}
    assert switch.review(switch.switched_round + 16, rates, 4)
    assert switch.num_switches == before + 1


def test_what_is_far_better_waits_no_longer_for_that() -> None:
    """What it has changed to last was a mistake: measured, it is far slower than it was thought to be."""
    switch = switch_at_lockstep()
    for now in (16, 32, 64):
        best, other = ("plain", "lockstep") if switch.kind == "lockstep" else ("lockstep", "plain")
        switch.review(now, {best: 1.5, other: 1.0}, 4)
    assert switch.kind == "plain"
    before = switch.switched_round
    assert not switch.review(before + 16, {"plain": 1.0, "lockstep": 1.12}, 4)
    assert not switch.review(before + 15, {"plain": 1.0, "lockstep": 1.2}, 4)
    assert switch.review(before + 16, {"plain": 1.0, "lockstep": 1.2}, 4)


def test_alone_nothing_is_changed() -> None:
    assert not switch_at_lockstep().review(100, {"plain": 1.0}, 4)
