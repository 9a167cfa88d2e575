"""Acceptance estimates: what they converge to, how fast they follow, where new requests begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pytest
from msgspec.structs import replace

from specdec.core.ids import RequestId
from specdec.core.request import OTHER_CLASS
from specdec.scheduling.speculation.acceptance import MAX_CLASSES, AcceptanceTracker
from specdec.scheduling.speculation.controller import DraftOutcome
from tests.specdec.scheduling.speculation.tree_verdicts import Trees


class Source:
    """Draws verdicts and tells a tracker."""

    def __init__(self, tracker: AcceptanceTracker, seed: int = 0) -> None:
        self.tracker = tracker
        self.generator = np.random.default_rng(seed)

    def round(
        self, chances: Mapping[str, float | tuple[float, ...]], *, k: int = 4, name: str = OTHER_CLASS
    ) -> None:
        outcomes = []
        for request, chance in chances.items():
            by_position = (chance,) * k if isinstance(chance, float) else chance
            stands = 0
            while stands < k and self.generator.random() < by_position[stands]:
                stands += 1
            outcomes.append(DraftOutcome(request_id=RequestId(request), num_drafted=k, num_accepted=stands))
        classes = dict.fromkeys(map(RequestId, chances), name)
        self.tracker.note(outcomes, dict.fromkeys(map(RequestId, chances), k), classes)

    def rounds(
        self, number: int, chances: Mapping[str, float | tuple[float, ...]], **options: object
    ) -> None:
        for _ in range(number):
            self.round(chances, **options)  # type: ignore[arg-type]


def accepted(tracker: AcceptanceTracker, request: str, name: str = OTHER_CLASS) -> np.ndarray:
    return tracker.estimate([RequestId(request)], [name]).accepted[0]


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.6, 0.9, 0.98])
def test_an_estimate_comes_to_the_truth(chance: float) -> None:
    tracker = AcceptanceTracker(4)
    Source(tracker).rounds(300, {"a": chance})
    assert accepted(tracker, "a")[0] == pytest.approx(chance, abs=0.09)


def test_positions_differ() -> None:
    tracker = AcceptanceTracker(4)
    chances = (0.9, 0.7, 0.5, 0.3)
    Source(tracker).rounds(400, {f"r{index}": chances for index in range(8)})
    estimate = tracker.estimate([RequestId(f"r{index}") for index in range(8)], [OTHER_CLASS] * 8)
    assert estimate.accepted.mean(0) == pytest.approx(chances, abs=0.06)
    assert (np.diff(estimate.reached.mean(0)) < 0).all()


def test_requests_differ_after_a_few_verdicts() -> None:
    tracker = AcceptanceTracker(4)
    source = Source(tracker)
    source.rounds(60, {"good": 0.9, "bad": 0.2})
    source.rounds(12, {"good2": 0.9, "bad2": 0.2})
    assert accepted(tracker, "good2")[0] > accepted(tracker, "bad2")[0] + 0.25


def test_a_new_request_begins_as_its_class() -> None:
    tracker = AcceptanceTracker(4)
    source = Source(tracker)
    source.rounds(100, {"a": 0.9, "b": 0.9}, name="code")
    source.rounds(100, {"c": 0.2, "d": 0.2}, name="chat")
    assert accepted(tracker, "new", "code")[0] == pytest.approx(0.9, abs=0.05)
    assert accepted(tracker, "new", "chat")[0] == pytest.approx(0.2, abs=0.07)
    assert accepted(tracker, "new", "code") == pytest.approx(tracker.class_acceptance("code"), abs=0.05)


def test_a_new_class_begins_as_all_the_others() -> None:
    tracker = AcceptanceTracker(4)
    source = Source(tracker)
    source.rounds(200, {"a": 0.9}, name="code")
    source.rounds(200, {"b": 0.9}, name="chat")
    assert accepted(tracker, "new", "poems")[0] > 0.8


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.2), (0.2, 0.9), (0.95, 0.6)])
def test_a_sudden_change_is_followed(before: float, after: float) -> None:
    tracker = AcceptanceTracker(4)
    source = Source(tracker)
    source.rounds(500, {"a": before})
    source.rounds(25, {"a": after})
    middle = 0.5 * (before + after)
    assert (accepted(tracker, "a")[0] < middle) == (after < before)


def test_what_is_stale_goes_back_to_the_class() -> None:
    tracker = AcceptanceTracker(4)
    source = Source(tracker)
    source.rounds(60, {"odd": 0.1})
    source.rounds(100, {f"r{index}": 0.8 for index in range(6)})
    before = accepted(tracker, "odd")[0]
    source.rounds(1500, {f"r{index}": 0.8 for index in range(6)})
    assert before < 0.4
    assert accepted(tracker, "odd")[0] > 0.65


def test_missing_and_short_proposals_are_expected_to_go_on() -> None:
    """Half of the proposals are missing, and none has more than two tokens of the four asked for."""
    tracker = AcceptanceTracker(4)
    request = RequestId("a")
    for number in range(200):
        outcome = DraftOutcome(request_id=request, num_drafted=2, num_accepted=2)
        tracker.note([outcome] if number % 2 else [], {request: 4}, {})
    estimate = tracker.estimate([request], [OTHER_CLASS])
    assert estimate.present[0, 0] == pytest.approx(0.5, abs=0.05)
    assert estimate.present[0, 1] > 0.9
    assert estimate.present[0, 2] < 0.1
    assert estimate.reached[0, 2] < 0.06
    assert estimate.filled[0].sum() == pytest.approx(1.0, abs=0.15)


def test_requests_are_forgotten() -> None:
    tracker = AcceptanceTracker(4)
    source = Source(tracker)
    for number in range(40):
        source.rounds(3, {f"{number}-{index}": 0.5 for index in range(8)})
        tracker.forget([RequestId(f"{number}-{index}") for index in range(7)])
    assert len(tracker) == 40
    tracker.forget_idle(30)
    assert len(tracker) == 11
    tracker.forget([RequestId("nobody")])


def test_classes_are_bounded() -> None:
    tracker = AcceptanceTracker(2)
    source = Source(tracker)
    for number in range(MAX_CLASSES + 20):
        source.rounds(2, {f"r{number}": 0.5}, k=2, name=f"class {number}")
    assert accepted(tracker, "new", f"class {MAX_CLASSES + 19}") == pytest.approx(
        tracker.class_acceptance(OTHER_CLASS)
    )


def test_what_a_request_would_be_in_another_class() -> None:
    """As much worse than that class as it is worse than its own, whatever is known of its own positions."""
    tracker = AcceptanceTracker(2)
    names = [RequestId(f"r{number}") for number in range(8)]
    classes = {name: "narrow" if number < 6 else "wide" for number, name in enumerate(names)}
    generator = np.random.default_rng(3)
    for _ in range(200):
        outcomes = []
        for number, name in enumerate(names):
            chance = (0.4 if number < 6 else 0.9) - 0.06 * (number == 0)
            accepted = int(generator.random() < chance)
            outcomes.append(DraftOutcome(request_id=name, num_drafted=1, num_accepted=accepted))
        tracker.note(outcomes, {}, classes)
    as_it_is = tracker.estimate(names[:2], ["narrow"] * 2).accepted[:, 0]
    would_be = tracker.estimate(names[:2], ["wide"] * 2).accepted[:, 0]
    assert as_it_is == pytest.approx([0.34, 0.4], abs=0.1)
    assert min(would_be) > 0.8
    before = tracker.estimate(names[:1], ["narrow"]).accepted[0, 0]
    tracker.reclass(names[0], "narrow")
    assert tracker.estimate(names[:1], ["narrow"]).accepted[0, 0] == before, "it is of that class"
    tracker.reclass_changed({names[0]: "narrow", names[1]: "narrow"}, {names[0]: "wide", names[1]: "narrow"})
    changed = tracker.estimate(names[:2], ["wide", "narrow"]).accepted[:, 0]
    assert changed[0] < would_be[0], "a little is kept of what is known of its positions"
    assert changed[1] == as_it_is[1]


def test_a_slot_is_used_again_without_what_was_in_it() -> None:
    tracker = AcceptanceTracker(4)
    source = Source(tracker)
    source.rounds(100, {"bad": 0.05, "r1": 0.9, "r2": 0.9, "r3": 0.9})
    tracker.forget([RequestId("bad")])
    source.round({"fresh": 0.9})
    assert accepted(tracker, "fresh")[0] > 0.4


def test_estimates_stay_probabilities() -> None:
    tracker = AcceptanceTracker(3)
    source = Source(tracker)
    source.rounds(300, {"sure": 1.0, "never": 0.0}, k=3)
    estimate = tracker.estimate([RequestId("sure"), RequestId("never"), RequestId("new")], [OTHER_CLASS] * 3)
    for values in (estimate.accepted, estimate.present):
        assert ((values > 0.0) & (values < 1.0)).all()
    assert estimate.accepted[0, 0] > 0.97
    assert estimate.accepted[1, 0] < 0.05


def test_a_long_run_costs_no_memory() -> None:
    """Requests that come and go leave neither slots nor names behind."""
    tracker = AcceptanceTracker(2)
    source = Source(tracker)
    for number in range(600):
        source.round({f"{number}": 0.5, f"{number}b": 0.5}, k=2)
        tracker.forget_idle(8)
    assert len(tracker) < 20


@pytest.mark.parametrize("rates", [(0.6, 0.2, 0.1), (0.35, 0.2, 0.15, 0.1), (0.9, 0.05)])
@pytest.mark.parametrize("num_drafted", [6, 12])
def test_what_a_tree_of_any_size_brings(rates: tuple[float, ...], num_drafted: int) -> None:
    """Tokens expected of the first n nodes, for every n up to what is drafted: that is what sizes trees."""
    trees = Trees(rates, 12)
    tracker = AcceptanceTracker(12)
    names = [f"r{index}" for index in range(8)]
    for _ in range(300):
        outcomes = [trees.outcome(name, num_drafted) for name in names]
        tracker.note(outcomes, {}, dict.fromkeys(map(RequestId, names), OTHER_CLASS))
    estimate = tracker.estimate(list(map(RequestId, names)), [OTHER_CLASS] * len(names))
    brought = np.cumprod(estimate.accepted, axis=1).mean(0).cumsum()
    assert brought[:num_drafted] == pytest.approx(trees.values.cumsum()[:num_drafted], rel=0.15)
    assert (estimate.accepted <= 1.0).all()


@pytest.mark.parametrize("rates", [(0.45, 0.2, 0.1, 0.06), (0.6, 0.2, 0.1), (0.35, 0.2, 0.15, 0.1)])
def test_what_further_nodes_bring_is_told_from_the_first(rates: tuple[float, ...]) -> None:
    """Trees of 6 nodes are drafted, and it is asked what 20 would bring. As of a chain, by the mean of all
    positions, it would be far less.
    """
    trees = Trees(rates, 20)
    outcomes = [trees.outcome("a", 6) for _ in range(400)]
    further = {}
    shapes: tuple[Literal["tree", "chain"], ...] = ("tree", "chain")
    for shape in shapes:
        tracker = AcceptanceTracker(20, shape=shape)
        for outcome in outcomes:
            tracker.note([outcome], {}, {RequestId("a"): OTHER_CLASS})
        reached = np.cumprod(tracker.estimate([RequestId("b")], [OTHER_CLASS]).accepted)
        assert reached[:6].sum() == pytest.approx(trees.values[:6].sum(), rel=0.1)
        further[shape] = float(reached[6:].sum())
    true = float(trees.values[6:].sum())
    assert 0.6 * true < further["tree"] < 1.6 * true
    assert further["chain"] < 0.4 * true


def test_a_tree_of_which_nothing_is_known() -> None:
    reached = np.cumprod(
        AcceptanceTracker(8, shape="tree").estimate([RequestId("a")], [OTHER_CLASS]).accepted
    )
    assert reached == pytest.approx(reached[0] / np.arange(1.0, 9.0), rel=0.02)
    assert AcceptanceTracker(1, shape="tree").class_acceptance() == pytest.approx([0.65])


def test_control_a_tree_read_as_a_chain_looks_better_the_smaller_it_is() -> None:
    """As if the first nodes were those that stood: whatever stands counts for them."""
    trees = Trees((0.4, 0.3, 0.2), 12)
    tracker = AcceptanceTracker(12)
    for _ in range(300):
        outcome = replace(trees.outcome("a", 12), accepted_nodes=None)
        tracker.note([outcome], {}, {RequestId("a"): OTHER_CLASS})
    assert accepted(tracker, "a")[0] > trees.values[0] + 0.3
