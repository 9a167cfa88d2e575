"""What is tried, and when that ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdec.scheduling.speculation.goodput import Kind
from specdec.scheduling.speculation.trial_choice import begin_trial, probed, tried_or_usual
from specdec.scheduling.speculation.trials import Trials
from tests.specdec.scheduling.speculation.round_comparisons import asking, compared


def test_an_audit_leaves_drafts_out_and_a_trial_of_nothing_ends() -> None:
    trials = Trials(0.5)
    on = compared("lockstep", {"plain": 1.9, "lockstep": 2.0}, {})
    assert tried_or_usual(trials, on, None) == (on.usual, "gain")
    for _ in range(64):
        trials.note_round(1.0, 0.0)
    begin_trial(trials, on, 4, None)
    assert trials.current == "auditing"
    assert tried_or_usual(trials, on, None) == (on.plain, "auditing")
    off = compared("plain", {"plain": 2.0, "lockstep": 1.0}, {})
    assert tried_or_usual(trials, off, None) == (off.plain, "no_gain")
    assert trials.current is None


@pytest.mark.parametrize("kind", ["lockstep", "draft_ahead"])
def test_drafts_that_requests_ask_for_are_not_left_out(kind: Kind) -> None:
    """Plain rounds have them, too: they are another way to run them where drafts are made ahead."""
    on = asking(compared(kind, {"plain": 1.9, kind: 2.0}, {}), 4, 4)
    trials = Trials(0.5)
    for _ in range(64):
        trials.note_round(1.0, 0.0)
    begin_trial(trials, on, 2, None)
    assert trials.current == (None if kind == "lockstep" else "auditing")


def test_where_there_are_no_drafts_they_are_not_left_out_but_asked_for() -> None:
    """Since latency targets leave none: an audit would find that nothing is lost, again and again."""
    trials = Trials(0.5)
    off = compared("lockstep", {"plain": 1.9}, {})
    for _ in range(64):
        trials.note_round(1.0, 0.0)
    begin_trial(trials, off, 4, None)
    assert trials.current is None
    tried = compared("lockstep", {"plain": 1.9, "lockstep": 2.0}, {}).usual._replace(round_s=4.0)
    off = replace(off, beyond_targets=tried)
    begin_trial(trials, off, 4, None)
    assert trials.current == "probing"
    assert tried_or_usual(trials, off, None) == (tried, "probing")


def test_what_is_about_as_good_is_probed_as_it_would_be_done() -> None:
    """What it takes is in doubt, too: which the youngest alone would not tell."""
    close = asking(compared("plain", {"plain": 2.0, "lockstep": 1.9}, {}), *[0] * 8)
    assert close.in_doubt == (close.options["lockstep"], False)
    trials = Trials(0.5)
    for _ in range(64):
        trials.note_round(1.0, 0.0)
    begin_trial(trials, close, 8, None)
    assert (trials.current, trials.num_rounds_left) == ("probing", 12)
    worse = asking(compared("plain", {"plain": 2.0, "lockstep": 1.5}, {}), *[0] * 8)
    assert worse.in_doubt == (worse.options["lockstep"], True)
    few = asking(compared("plain", {"plain": 2.0, "lockstep": 1.9}, {}), *[0] * 4)
    assert few.in_doubt == (few.options["lockstep"], True), "it drafts for all of them anyway"
    nothing = asking(compared("plain", {"plain": 2.0, "lockstep": 1.9}, {}), *[4] * 8)
    assert nothing.in_doubt == (nothing.options["lockstep"], True), "it drafts no more than is done"


def test_probes_draft_for_the_youngest() -> None:
    assert probed(np.zeros(6, dtype=np.int64)).tolist() == [0, 0, 1, 1, 1, 1]


def test_another_mode_is_compared_with_what_is_done() -> None:
    trials = Trials(0.5)
    on = compared("draft_ahead", {"plain": 0.1, "lockstep": 1.5, "draft_ahead": 2.0}, {})
    for _ in range(64):
        trials.note_round(1.0, 0.0)
    on = replace(on, little_known={"lockstep"})
    begin_trial(trials, on, 4, None)
    assert trials.current == "comparing"
    assert tried_or_usual(trials, on, None) == (on.options["lockstep"], "comparing")
    for _ in range(3):  # of the change
        assert not trials.note_round(1.0, 0.0, counts=False)
    has_ended = [trials.note_round(1.0, 0.25) for _ in range(7)]
    assert has_ended == [False] * 6 + [True]
    assert tried_or_usual(trials, on, None) == (on.usual, "gain")
    begin_trial(trials, on, 4, None)
    assert trials.current is None


def test_a_mode_that_is_nearly_as_good_is_looked_at_for_longer() -> None:
    """A few rounds would not tell which is better."""
    trials = Trials(0.5)
    on = compared("draft_ahead", {"plain": 0.1, "ping_pong": 1.8, "draft_ahead": 2.0}, {})
    for _ in range(64):
        trials.note_round(1.0, 0.0)
    begin_trial(trials, on, 4, None)
    assert (trials.current, trials.other_mode) == ("comparing", "ping_pong")
    has_ended = [trials.note_round(1.0, 0.1) for _ in range(16)]
    assert has_ended == [False] * 15 + [True]


def test_a_comparison_that_nothing_is_told_by_ends() -> None:
    trials = Trials(0.5)
    on = compared("draft_ahead", {"plain": 0.1, "lockstep": 1.5, "draft_ahead": 2.0}, {})
    for _ in range(64):
        trials.note_round(1.0, 0.0)
    begin_trial(trials, replace(on, little_known={"lockstep"}), 4, None)
    has_ended = [trials.note_round(1.0, 0.0, counts=False) for _ in range(20)]
    assert has_ended == [False] * 19 + [True]


def test_what_loses_much_is_not_compared() -> None:
    trials = Trials(0.004)
    on = compared("draft_ahead", {"plain": 0.1, "lockstep": 0.2, "draft_ahead": 2.0}, {})
    on = replace(on, little_known={"lockstep"})
    for _ in range(64):
        trials.note_round(1.0, 0.0)
        begin_trial(trials, on, 4, None)
        assert trials.current is None
