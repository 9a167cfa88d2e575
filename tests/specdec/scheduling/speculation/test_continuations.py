"""What becomes of continuations, and who is to blame for those that are missing."""

from __future__ import annotations

from typing import Any

from specdec.core.ids import RequestId
from specdec.core.proposal import AheadOutcome
from specdec.scheduling.speculation.continuations import Continuations
from specdec.scheduling.speculation.controller import RoundObservation
from specdec.scheduling.speculation.modes import OverlapMode

A, B = RequestId("a"), RequestId("b")
NOBODY: Any = None


def observed(mode: OverlapMode, *ahead: AheadOutcome) -> RoundObservation:
    return RoundObservation(
        num_rows=2,
        num_sequences=2,
        num_committed=2,
        draft_s=0.0,
        verify_s=0.01,
        outcomes=[],
        mode=mode,
        budgets={A: 4, B: 4},
        ahead=ahead,
    )


def outcome(one: RequestId, rank: int | None, *, is_late: bool = False) -> AheadOutcome:
    return AheadOutcome(
        request_id=one, num_pending=4, num_accepted=2, num_prepared=3, rank=rank, is_late=is_late
    )


def test_what_was_not_foreseen_is_not_owed() -> None:
    continuations = Continuations(4, 8)
    missed = observed("draft_ahead", outcome(A, None), outcome(B, 1))
    assert continuations.owed(missed, NOBODY) == {B: 4}
    assert continuations.owed(observed("lockstep"), NOBODY) == {A: 4, B: 4}
    after = observed("lockstep", outcome(A, None), outcome(B, 1))
    assert continuations.owed(after, NOBODY) == {B: 4}, "the first round behind it has what was prepared"


def test_late_ones_are_remembered_and_forgiven() -> None:
    continuations = Continuations(4, 8)
    assert continuations.outlook.in_time == 1.0
    continuations.note(1, observed("draft_ahead", outcome(A, None, is_late=True)))
    late = continuations.outlook.in_time
    assert late < 1.0
    continuations.note(2, observed("lockstep"))
    assert late < continuations.outlook.in_time < 1.0


def test_nothing_is_prepared_for_who_is_not_known() -> None:
    assert Continuations(4, 8).shares(None, A, 3, 4, is_foreign=False) == (0, 0, 0, 0)
