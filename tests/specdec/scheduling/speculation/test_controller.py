"""A fixed k: what it shares continuations out by is measured all the same."""

from __future__ import annotations

import pytest

from specdec.core.ids import RequestId
from specdec.core.proposal import AheadOutcome
from specdec.scheduling.speculation.controller import (
    DraftOutcome,
    FixedController,
    RoundObservation,
    bounded_choice,
)
from specdec.scheduling.speculation.modes import OverlapMode
from tests.specdec.scheduling.simulation import fake_request

A = RequestId("a")


def observed(
    mode: OverlapMode, num_accepted: int, *, is_stand_in: bool, rank: int | None
) -> RoundObservation:
    outcome = DraftOutcome(request_id=A, num_drafted=4, num_accepted=num_accepted)
    ahead = AheadOutcome(request_id=A, num_pending=4, num_accepted=num_accepted, num_prepared=4, rank=rank)
    return RoundObservation(
        num_rows=5,
        num_sequences=1,
        num_committed=num_accepted + 1,
        draft_s=0.0,
        verify_s=0.01,
        outcomes=[] if is_stand_in else [outcome],
        stand_ins=[outcome] if is_stand_in else [],
        mode=mode,
        ahead=(ahead,),
    )


def shares(
    mode: OverlapMode, num_accepted: int, *, is_foreign: bool = False, rank: int | None = 0
) -> tuple[int, ...]:
    """Continuations of a request after many rounds in which so many of four tokens were accepted."""
    controller = FixedController(4, mode)
    for _ in range(400):
        controller.observe(observed(mode, num_accepted, is_stand_in=is_foreign, rank=rank))
    shared = controller.fan_out(fake_request("a", 5), 4, 1, is_foreign=is_foreign)
    assert len(shared) == 5
    assert sum(shared) == 1
    return shared


@pytest.mark.parametrize("is_foreign", [False, True])
def test_continuations_are_where_verdicts_have_been(is_foreign: bool) -> None:
    none, all_of_them = (shares("draft_ahead", number, is_foreign=is_foreign) for number in (0, 4))
    assert none == (1, 0, 0, 0, 0)
    assert all_of_them == (0, 0, 0, 0, 1)


def test_whether_guesses_were_right_is_heard_of() -> None:
    """Where the token behind a rejected one is never guessed, what is left is that none is rejected."""
    assert shares("draft_ahead", 1, rank=0) == (1, 0, 0, 0, 0)
    assert shares("draft_ahead", 1, rank=None) == (0, 0, 0, 0, 1)


def test_where_nothing_is_drafted_ahead_nothing_is_learnt() -> None:
    """Negative control: such rounds say nothing of continuations."""
    assert shares("lockstep", 0) == shares("lockstep", 4)


def test_what_requests_ask_for_is_bounded_by_what_their_drafters_may_draft() -> None:
    wishes = [(None, None), (64, None), (64, 0), (64, 1), (2, 1), (64, 2), (3, 2), (0, 2)]
    requests = []
    for number, (wish, drafter) in enumerate(wishes):
        one = fake_request(str(number), 10)
        one.requested_draft_tokens, one.own_drafter = wish, drafter
        requests.append(one)
    alone, several = FixedController(6), FixedController(6, drafter_caps=(6, 3, 12))
    assert bounded_choice(alone, requests) == [6, 6, 6, 6, 2, 6, 3, 0]
    assert bounded_choice(several, requests) == [6, 6, 6, 3, 2, 6, 3, 0]
