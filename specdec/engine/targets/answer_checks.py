"""Whether what a target answers can be an answer to what it was asked."""

from __future__ import annotations

from specdec.core.errors import ProtocolError
from specdec.core.plan import TargetResult, TargetStep, TargetWork, WorkResult


def require_answer(step: TargetStep, result: TargetResult, *, may_verify: bool) -> None:
    """Check a result against its step.

    Args:
        step: what the target was given.
        result: what it has answered.
        may_verify: whether the rule has the target verify drafts itself, and answer with what is committed.

    Raises:
        ProtocolError: it is of another step, or has more or fewer tokens of a work than there can be.
    """
    if result.step_id != step.step_id or len(result.results) != len(step.works):
        raise ProtocolError(f"the target answered step {result.step_id} instead of {step.step_id}")
    for work, answer in zip(step.works, result.results, strict=True):
        num_beside = 0 if work.beside is None else work.beside.num_answered
        if len(answer.beside) not in (0, num_beside):
            raise ProtocolError(
                f"{len(answer.beside)} tokens for {num_beside} rows beside those of {work.request_id}"
            )
        if answer.drafted:
            _require_own_draft(work, answer, may_verify=may_verify)
        elif answer.error is None:
            _require_rows(work, len(answer.token_ids), may_verify=may_verify)


def _require_rows(work: TargetWork, num_tokens: int, *, may_verify: bool) -> None:
    num_rows = work.num_sampled_rows
    if num_tokens == num_rows or (may_verify and 1 <= num_tokens < num_rows):
        return
    raise ProtocolError(f"{num_tokens} tokens for {num_rows} rows of {work.request_id}")


def _require_own_draft(work: TargetWork, answer: WorkResult, *, may_verify: bool) -> None:
    """Check what the target has drafted itself, and verified."""
    num_drafted, num_tokens = len(answer.drafted), len(answer.token_ids)
    is_cut = answer.error is not None or (may_verify and num_tokens > 0)
    is_complete = num_tokens == num_drafted + 1 or (num_tokens <= num_drafted and is_cut)
    if num_drafted > work.num_self_drafted or not is_complete:
        raise ProtocolError(
            f"{num_tokens} tokens for {num_drafted} drafted ones of {work.request_id}, for which at most "
            f"{work.num_self_drafted} were asked"
        )
