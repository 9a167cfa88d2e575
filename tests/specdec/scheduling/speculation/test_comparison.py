"""Kinds of rounds beside one another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.scheduling.speculation.goodput import Kind
from tests.specdec.scheduling.speculation.round_comparisons import asking, compared


def test_why_what_is_done_is_done() -> None:
    assert compared("lockstep", {"plain": 1.0, "lockstep": 2.0}, {}).reason == "gain"
    assert compared("plain", {"plain": 2.0, "lockstep": 1.0}, {}).reason == "no_gain"
    slower = compared("plain", {"plain": 1.0, "lockstep": 2.0}, {"lockstep": 0.5})
    assert slower.reason == "measured_slower"
    assert slower.in_doubt == (slower.options["lockstep"], False)
    modes: dict[Kind, float] = {"plain": 1.0, "lockstep": 2.0, "ping_pong": 2.2}
    other = compared("lockstep", modes, {"ping_pong": 1.9})
    assert other.in_doubt == (other.options["ping_pong"], False)
    assert replace(other, just_compared={"ping_pong"}).in_doubt == (None, False), "it was measured just now"


@pytest.mark.parametrize("kind", ["plain", "lockstep"])
def test_what_requests_ask_for_is_a_reason_of_its_own(kind: Kind) -> None:
    """Whatever it brings, and whichever of two names it goes by."""
    alike = asking(compared(kind, {"plain": 2.0, "lockstep": 2.0}, {}), 4, 4)
    assert alike.reason == "requested"


def test_drafting_for_others_too_has_its_own_reason() -> None:
    off = asking(compared("plain", {"plain": 2.0, "lockstep": 1.0}, {}), 4, 0)
    assert off.reason == "requested"
    assert off.in_doubt == (off.options["lockstep"], True)
    assert replace(off, has_choice=False).in_doubt == (None, False), "all others have a k of 0"
    assert asking(compared("lockstep", {"plain": 1.0, "lockstep": 2.0}, {}), 4, 0).reason == "gain"
    assert asking(compared("plain", {"plain": 2.0, "lockstep": 1.0}, {}), 0, 0).reason == "no_gain"


def test_a_kind_that_is_not_there_is_plain_meanwhile() -> None:
    alone = compared("ping_pong", {"plain": 1.0, "lockstep": 2.0}, {})
    assert alone.usual is alone.plain


def test_what_targets_would_leave_is_asked_whatever_else_is_done() -> None:
    alone = compared("lockstep", {"plain": 1.0}, {})
    assert alone.in_doubt == (None, False)
    tried = compared("lockstep", {"plain": 1.0, "lockstep": 2.0}, {}).usual
    assert replace(alone, beyond_targets=tried).in_doubt == (tried, True)


def test_of_other_modes_the_best_is_looked_at_that_little_is_known_of() -> None:
    expected: dict[Kind, float] = {"plain": 1.0, "lockstep": 1.5, "ping_pong": 2.0, "draft_ahead": 1.8}
    expected["draft_ahead"] = 1.6
    on = compared("ping_pong", expected, {})
    assert on.other_mode() is None
    for little_known, other in (
        ({"plain", "lockstep", "draft_ahead"}, "draft_ahead"),
        ({"lockstep", "ping_pong"}, "lockstep"),
        ({"plain", "ping_pong"}, None),
    ):
        option = replace(on, little_known=little_known).other_mode()
        assert (None if option is None else option.kind) == other
    off = compared("plain", {"plain": 2.0, "lockstep": 1.0}, {})
    assert replace(off, little_known={"lockstep"}).other_mode() is None


def test_modes_that_are_nearly_as_good_are_looked_at_in_turn() -> None:
    expected: dict[Kind, float] = {"plain": 1.0, "lockstep": 1.8, "ping_pong": 2.0, "draft_ahead": 1.9}
    on = compared("ping_pong", expected, {})
    assert on.other_mode() is on.options["draft_ahead"]
    then: dict[Kind, int] = {"draft_ahead": 40}
    assert replace(on, last_compared=then).other_mode() is on.options["lockstep"]
    then["lockstep"] = 60
    assert replace(on, last_compared=then).other_mode() is on.options["draft_ahead"]
    worse = compared("ping_pong", {**expected, "draft_ahead": 1.6}, {})
    assert replace(worse, last_compared=then).other_mode() is worse.options["lockstep"], (
        "the other is far worse"
    )
    off = compared("plain", {"plain": 2.0, "lockstep": 1.9, "draft_ahead": 1.9}, {})
    assert off.other_mode() is None, "probes ask"


def test_a_mode_that_is_thought_to_be_better_is_looked_at_first() -> None:
    expected: dict[Kind, float] = {"plain": 1.0, "lockstep": 2.0, "ping_pong": 2.02, "draft_ahead": 2.1}
    on = replace(
        compared("lockstep", expected, {}), little_known={"ping_pong"}, last_compared={"draft_ahead": 9}
    )
    assert on.other_mode() is on.options["draft_ahead"]
    assert on.is_better(on.options["draft_ahead"])
    assert not on.is_better(on.options["ping_pong"]), "by less than the margin"


def test_what_is_known_of_a_mode_that_was_left_says_little_of_another_one() -> None:
    """Unless none was run: then probes ask, which cost less."""
    expected: dict[Kind, float] = {"plain": 1.0, "lockstep": 0.9, "draft_ahead": 1.2}
    off = compared("plain", expected, {"draft_ahead": 0.7})
    asked = replace(off, little_known={"plain", "lockstep"}).other_mode()
    assert asked is off.options["lockstep"]
    assert replace(off, little_known={"lockstep", "draft_ahead"}).other_mode() is None
    alone = compared("ping_pong", expected, {})
    assert replace(alone, little_known={"lockstep"}).other_mode() is None, "it takes two"
