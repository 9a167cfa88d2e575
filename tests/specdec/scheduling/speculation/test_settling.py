"""Which rounds say something of their kind."""

from __future__ import annotations

import itertools

from specdec.core.ids import RequestId
from specdec.scheduling.speculation.controller import RoundObservation
from specdec.scheduling.speculation.goodput import Kind
from specdec.scheduling.speculation.modes import OverlapMode
from specdec.scheduling.speculation.settling import Settling, kind_of, num_unsettled


def round_of(mode: OverlapMode = "lockstep", budget: int = 0, num_behind: int = 0) -> RoundObservation:
    return RoundObservation(
        num_rows=1,
        num_sequences=1,
        num_committed=1,
        draft_s=0.0,
        verify_s=0.01,
        outcomes=[],
        mode=mode,
        budgets={RequestId("a"): budget},
        num_behind=num_behind,
    )


def test_kinds() -> None:
    assert kind_of(round_of()) == "plain"
    assert kind_of(round_of(budget=1)) == "lockstep"
    assert kind_of(round_of("draft_ahead")) == "draft_ahead"


def test_the_first_rounds_after_a_change_say_nothing() -> None:
    settling = Settling()
    alike = []
    for _ in range(5):
        assert settling.note(round_of("draft_ahead", 1)) == "draft_ahead"
        alike.append(settling.is_alike)
        assert settling.is_as_it_seems
    assert alike == [False, False, False, True, True]


def test_how_many_rounds_a_change_takes() -> None:
    kinds: dict[Kind, RoundObservation] = {
        "plain": round_of(),
        "lockstep": round_of(budget=1),
        "ping_pong": round_of("ping_pong", 1),
        "draft_ahead": round_of("draft_ahead", 1),
    }
    for before, kind in itertools.permutations(kinds, 2):
        settling = Settling()
        for _ in range(6):
            settling.note(kinds[before])
        settled = []
        for _ in range(6):
            settling.note(kinds[kind])
            settled.append(settling.is_alike and settling.is_as_it_seems)
        assert settled.index(True) == num_unsettled(kind, before), (before, kind)


def test_a_drafter_that_worked_beside_goes_on_for_a_while() -> None:
    settling = Settling()
    settling.note(round_of("ping_pong", 1))
    seems = []
    for _ in range(4):
        settling.note(round_of(budget=1))
        seems.append(settling.is_as_it_seems)
    assert seems == [False, False, True, True]


def test_it_is_calm_once_a_few_plain_rounds_have_run_alone() -> None:
    settling = Settling()
    calm = []
    for one in (round_of(), round_of(), round_of(budget=1), round_of(), round_of(), round_of("ping_pong", 1)):
        settling.note(one)
        calm.append(settling.is_calm)
    assert calm == [True, True, False, False, True, False]
    for _ in range(4):
        settling.note(round_of())
        calm.append(settling.is_calm)
    assert calm[6:] == [False, False, True, True]


def test_a_drafter_that_reads_what_was_committed_without_it_says_nothing_of_drafting() -> None:
    settling = Settling()
    says_something = []
    for num_behind in (0, 20, 20, 2, 20):  # the last one: nothing had been left out just before
        settling.note(round_of(budget=2 if says_something else 0, num_behind=num_behind))
        says_something.append(settling.is_alike)
        assert settling.is_catching_up is not settling.is_alike
    assert says_something == [True, False, False, True, True]


def test_a_drafter_that_always_has_more_to_read_is_slow() -> None:
    settling = Settling()
    settling.note(round_of())
    catching_up = []
    for _ in range(40):
        settling.note(round_of(budget=1, num_behind=20))
        catching_up.append(settling.is_catching_up)
    assert catching_up == [True] * 32 + [False] * 8
