"""Answers that cannot be answers to what the target was asked are told from those that can."""

from __future__ import annotations

import pytest

from specdec.core.errors import ProtocolError
from specdec.core.ids import RequestId
from specdec.core.plan import TargetResult, TargetStep, TargetWork, WorkResult
from specdec.core.rows_beside import RowsBeside
from specdec.engine.targets.answer_checks import require_answer


def work(num_rows: int = 3, *, num_self_drafted: int = 0, num_beside: int = 0) -> TargetWork:
    return TargetWork(
        request_id=RequestId("a"),
        token_ids=tuple(range(max(num_rows, 1))),
        start=5,
        num_sampled_rows=num_rows,
        table_start=0,
        block_ids=(1,),
        num_self_drafted=num_self_drafted,
        beside=RowsBeside((1, 2, 3), (-1, 0, 1), num_beside) if num_beside else None,
    )


def tokens(number: int) -> tuple[int, ...]:
    return tuple(range(number))


def check(asked: TargetWork, answer: WorkResult, *, may_verify: bool = False) -> None:
    require_answer(TargetStep(7, (asked,)), TargetResult(7, (answer,)), may_verify=may_verify)


@pytest.mark.parametrize("may_verify", [False, True])
@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (work(), WorkResult(tokens(3))),
        (work(0), WorkResult(())),
        (work(), WorkResult(tokens(2), error="not finite", error_code="non_finite_logits")),
        (work(num_beside=2), WorkResult(tokens(3), beside=(8, 9))),
        (work(num_beside=2), WorkResult(tokens(3))),  # one was not finite
        (work(1, num_self_drafted=4), WorkResult(tokens(5), drafted=tokens(4))),
        (work(1, num_self_drafted=4), WorkResult(tokens(2), drafted=tokens(1))),  # no room for more
        (work(1, num_self_drafted=4), WorkResult(tokens(1))),
        (work(1, num_self_drafted=4), WorkResult((), error="not finite", drafted=tokens(4))),
    ],
)
def test_what_can_be(asked: TargetWork, answer: WorkResult, may_verify: bool) -> None:
    check(asked, answer, may_verify=may_verify)


@pytest.mark.parametrize("may_verify", [False, True])
@pytest.mark.parametrize(
    ("asked", "answer", "message"),
    [
        (work(), WorkResult(tokens(4)), "4 tokens for 3 rows of a"),
        (work(), WorkResult(()), "0 tokens for 3 rows of a"),
        (work(0), WorkResult(tokens(1)), "1 tokens for 0 rows of a"),
        (work(), WorkResult(tokens(3), beside=(8,)), "1 tokens for 0 rows beside those of a"),
        (work(num_beside=2), WorkResult(tokens(3), beside=(8,)), "1 tokens for 2 rows beside those of a"),
        (work(1), WorkResult(tokens(2), drafted=tokens(1)), "for which at most 0 were asked"),
        (work(1, num_self_drafted=2), WorkResult(tokens(4), drafted=tokens(3)), "at most 2 were asked"),
        (
            work(1, num_self_drafted=2),
            WorkResult(tokens(4), drafted=tokens(2)),
            "4 tokens for 2 drafted ones",
        ),
        (work(1, num_self_drafted=2), WorkResult((), drafted=tokens(2)), "0 tokens for 2 drafted ones of a"),
    ],
)
def test_what_cannot_be(asked: TargetWork, answer: WorkResult, message: str, may_verify: bool) -> None:
    with pytest.raises(ProtocolError, match=message):
        check(asked, answer, may_verify=may_verify)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (work(), WorkResult(tokens(2))),
        (work(1, num_self_drafted=4), WorkResult(tokens(2), drafted=tokens(4))),
    ],
)
def test_only_a_target_that_verifies_leaves_out_what_was_not_accepted(
    asked: TargetWork, answer: WorkResult
) -> None:
    check(asked, answer, may_verify=True)
    with pytest.raises(ProtocolError, match="2 tokens for"):
        check(asked, answer)


@pytest.mark.parametrize(
    "result", [TargetResult(6, (WorkResult(tokens(3)),)), TargetResult(7, ()), TargetResult(8, ())]
)
def test_another_step(result: TargetResult) -> None:
    with pytest.raises(ProtocolError, match=rf"the target answered step {result.step_id} instead of 7"):
        require_answer(TargetStep(7, (work(),)), result, may_verify=True)
