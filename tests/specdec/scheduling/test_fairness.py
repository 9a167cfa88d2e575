"""Turns among owners: everybody gets as much, whoever asks for more."""

from __future__ import annotations

import random

from specdec.scheduling.fairness import FairTurns


def test_one_owner_is_served_in_order_of_arrival() -> None:
    turns = FairTurns()
    taken = [turns.take("a", 10) for _ in range(5)]
    assert taken == [0, 10, 20, 30, 40]


def test_a_newcomer_goes_before_what_others_have_waiting() -> None:
    turns = FairTurns()
    heavy = [turns.take("heavy", 10) for _ in range(100)]
    turns.note_start(heavy[0])
    assert turns.take("light", 10) <= heavy[1]


def test_who_was_away_has_saved_nothing_up() -> None:
    turns = FairTurns()
    turns.take("away", 10)
    for _ in range(100):
        turns.note_start(turns.take("busy", 10))
    assert turns.next_turn("away") == turns.next_turn("busy") - 10


def test_who_leaves_before_its_turn_pays_nothing() -> None:
    turns = FairTurns()
    turns.take("a", 10)
    turns.take("a", 1000)
    turns.give_back("a", 1000)
    assert turns.next_turn("a") == 10


def test_busy_owners_get_equal_shares_whatever_the_sizes_of_their_requests() -> None:
    generator = random.Random(1)
    turns = FairTurns()
    served = {"small": 0, "large": 0, "bursty": 0}
    sizes = {"small": 5, "large": 80, "bursty": 20}
    queue = [(turns.take(owner, sizes[owner]), index, owner) for index, owner in enumerate(served)]
    index = len(queue)
    while sum(served.values()) < 30_000:
        turn, _, owner = min(queue)
        queue.remove(min(queue))
        turns.note_start(turn)
        served[owner] += sizes[owner]
        for _ in range(generator.randint(1, 3) if owner == "bursty" and len(queue) < 50 else 1):
            queue.append((turns.take(owner, sizes[owner]), index, owner))
            index += 1
    assert max(served.values()) - min(served.values()) <= 0.1 * 30_000


def test_what_waits_at_another_priority_says_nothing() -> None:
    turns = FairTurns()
    for _ in range(100):
        turns.take("bulk", 500, priority=10)
    for _ in range(3):
        turns.note_start(turns.take("busy", 40))
    assert turns.next_turn("bulk") <= turns.next_turn("busy")
    assert turns.next_turn("bulk", priority=10) == 50_000


def test_owners_pay_for_what_their_requests_were_and_not_for_what_was_expected() -> None:
    """One generates four thousand tokens a time where five hundred are expected of all; another forty."""
    served = {"long": 0, "short": 0}
    sizes = {"long": (500, 4000), "short": (40, 40)}
    turns = FairTurns()
    queue = [(turns.take(owner, sizes[owner][0]), index, owner) for index, owner in enumerate(served)]
    index = len(queue)
    while sum(served.values()) < 400_000:
        turn, _, owner = min(queue)
        queue.remove(min(queue))
        turns.note_start(turn)
        expected, number = sizes[owner]
        served[owner] += number
        turns.settle(owner, number - expected)
        queue.append((turns.take(owner, expected), index, owner))
        index += 1
    assert abs(served["long"] - served["short"]) <= 0.05 * 400_000


def test_an_idle_engine_forgets_its_owners() -> None:
    turns = FairTurns()
    turns.note_start(turns.take("a", 1000))
    turns.take("a", 1000)
    turns.note_idle()
    assert turns.next_turn("a") == turns.next_turn("b") == 0
