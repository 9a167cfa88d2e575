"""Whether a request may enter the queue at all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from specdec.core.errors import CapacityError, InputError, LateError
from specdec.core.proposal import MAX_DRAFT_TOKENS
from specdec.core.request import Request
from specdec.kv.selection import KvBudgets, WrittenBudget
from specdec.scheduling.service_rates import Expectation
from specdec.scheduling.speculation.drafter_shares import DrafterSet
from specdec.scheduling.state import Schedulable, ServiceKey

MAX_PRIORITY = 1000
"""Largest distance of a request's priority from 0."""
_SHORTEST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0
_HELD_PART = 0.02
"""Of a wait, for which a refusal holds: so little of the queue is served without anybody joining it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """What a target can serve."""

    vocab_size: int
    max_model_len: int
    """Longest sequence of the model, in tokens."""
    pool_tokens: int
    """Tokens that the whole KV pool holds."""
    max_num_waiting: int
    kv_budgets: KvBudgets | None = None
    """None: drafts attend to everything."""
    drafters: DrafterSet | None = None
    """None: there is but one."""

    @property
    def max_sequence_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return min(self.max_model_len, self.pool_tokens)


def check_request(request: Request, limits: AdmissionLimits) -> None:
    """Check that a request can be served by an otherwise empty engine.

    Raises:
        InputError: naming the field that is wrong.
    """
    request.params.checked().check_vocabulary(limits.vocab_size)
    if not request.prompt_token_ids:
        raise InputError("the prompt is empty", param="prompt")
    for token_ids, param in (
        (request.prompt_token_ids, "prompt"),
        (request.delivered_token_ids, "delivered_token_ids"),
    ):
        _require_integers(token_ids, param)
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
            raise InputError(
                f"token ids must be between 0 and {limits.vocab_size - 1}, "
                f"got {min(token_ids)} to {max(token_ids)}",
                param=param,
            )
    if not 0 <= request.seed < 1 << 64:
        raise InputError(f"seed must be an unsigned 64-bit number, got {request.seed}", param="seed")
    _check_length(request, limits)
    _check_order(request)
    requested = request.num_draft_tokens
    if requested is not None and not 0 <= requested <= MAX_DRAFT_TOKENS:
        raise InputError(
            f"num_draft_tokens must be between 0 and {MAX_DRAFT_TOKENS}, got {requested}",
            param="num_draft_tokens",
        )
    if request.drafter is not None:
        _check_drafter(request.drafter, limits.drafters)
    if request.kv_budget is not None:
        fault = _kv_budget_fault(request.kv_budget, request, limits.kv_budgets)
        if fault is not None:
            param = "speculation.kv_budget"
            raise InputError(f"{param}: {fault}", param=param)


def without_misfits(request: Request, limits: AdmissionLimits) -> Request:
    """Return a request that was taken in elsewhere without those of its wishes about drafting that do not fit
    here: they change speed alone, and an update may have brought other drafters.
    """
    if request.drafter is not None and (
        limits.drafters is None or limits.drafters.fault(request.drafter) is not None
    ):
        request = msgspec.structs.replace(request, drafter=None)
    if request.kv_budget is not None and _kv_budget_fault(request.kv_budget, request, limits.kv_budgets):
        request = msgspec.structs.replace(request, kv_budget=None)
    return request


def _kv_budget_fault(written: WrittenBudget, request: Request, budgets: KvBudgets | None) -> str | None:
    """Say why a request cannot have a budget; None: it can."""
    if budgets is None:
        return "drafts attend to everything here (speculative_config.kv.policy: full): leave it out"
    if request.drafter is not None and not budgets.is_of(request.drafter):
        return (
            f"speculation.drafter {request.drafter!r} attends to what it always does: leave one of them out, "
            f"or ask for {budgets.drafter!r}, which has budgets"
        )
    return budgets.fault(written, request.num_draft_tokens)


def _check_drafter(wanted: str, drafters: DrafterSet | None) -> None:
    param = "speculation.drafter"
    if drafters is None:
        raise InputError(
            f"{param}: there are no drafters to choose from here (speculative_config.drafters): leave it out",
            param=param,
        )
    fault = drafters.fault(wanted)
    if fault is not None:
        raise InputError(f"{param}: {fault}", param=param)


def _check_order(request: Request) -> None:
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise InputError(
            f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, got {request.priority}",
            param="priority",
        )
    slo = request.slo
    for name in ("ttft_ms", "itl_ms"):
        wanted_ms = None if slo is None else getattr(slo, name)
        if wanted_ms is not None and not 0 < wanted_ms < math.inf:
            raise InputError(
                f"slo.{name} must be a positive number of milliseconds, got {wanted_ms}", param="slo"
            )
    timeout_s = request.timeout_s
    if timeout_s is not None and not 0 <= timeout_s < math.inf:
        raise InputError(f"timeout_s must be a number of seconds, got {timeout_s}", param="timeout_s")


def _require_integers(values: Iterable[object], param: str) -> None:
    for value in values:
        if not isinstance(value, int):
            raise InputError(f"token ids must be integers, got {value!r}", param=param)


def _check_length(request: Request, limits: AdmissionLimits) -> None:
    length = len(request.prompt_token_ids)
    num_generated = 0 if request.params.max_tokens == 0 else 1
    room = limits.max_sequence_len - num_generated
    if length <= room:
        return
    if limits.max_model_len <= limits.pool_tokens:
        reason = f"the model's context is {limits.max_model_len} tokens"
        reason += " and at least one is generated" if num_generated else ""
    else:
        reason = (
            f"the KV cache holds {limits.pool_tokens} tokens (cache.memory_bytes or cache.memory_fraction "
            "make it larger)"
        )
    raise InputError(f"the prompt has {length} tokens, at most {room} fit: {reason}", param="prompt")


def check_queue(num_waiting: int, limits: AdmissionLimits, seconds_per_request: float) -> None:
    """Check that the queue has room: `num_waiting` would wait, leaving out those who can run at once.

    `seconds_per_request` is the mean time between two requests that finished lately; with it the answer
    tells when to try again.

    Raises:
        CapacityError: the queue is full.
    """
    if num_waiting <= limits.max_num_waiting:
        return
    raise CapacityError(
        f"the queue is full ({limits.max_num_waiting} requests wait)",
        retry_after_s=retry_after_s(num_waiting, seconds_per_request),
        holds_s=_HELD_PART * seconds_per_request * num_waiting,
    )


def retry_after_s(num_waiting: int, seconds_per_request: float) -> float:
    """Return how long whom a full queue refuses should stay away.

    Room for one more is there as soon as one request is served; a client that comes back only then still
    waits behind the whole queue, so it is asked to stay away for about half of that.
    """
    return _bounded(seconds_per_request * max(1.0, num_waiting / 2))


def check_in_time(request: Request, expected: Expectation) -> None:
    """Check that a request can be served in the time that it gives.

    One that need not wait is never refused: nobody else would be served in its place, and if all were, what
    is expected would never be found to be wrong.

    Raises:
        LateError: it is expected to be late, or so near to it that more than a few of its kind would be.
    """
    if expected.wait_s <= 0.0:
        return
    ttft_ms = None if request.slo is None else request.slo.ttft_ms
    limits = (
        (
            "first token",
            "slo.ttft_ms gives",
            None if ttft_ms is None else ttft_ms / 1000.0,
            expected.first_token_s,
        ),
        ("end", "its time limit (timeout_s, or what stands for it) is", request.timeout_s, expected.end_s),
    )
    for what, what_limits, limit_s, expected_s in limits:
        if limit_s is not None and expected.margin * expected_s > limit_s:
            raise LateError(
                f"its {what} is expected in {expected_s:.1f} s, of which it would wait "
                f"{expected.wait_s:.1f} s in the queue; {what_limits} {limit_s:g} s",
                retry_after_s=_bounded(min(expected.margin * expected_s - limit_s, expected.wait_s)),
                holds_s=_HELD_PART * expected.wait_s,
            )


def may_be_displaced(waiting: Schedulable, by: ServiceKey, *, is_same_owner: bool) -> bool:
    """Whether the last in a full queue has to leave for a newcomer: it is behind that, not for its age."""
    return by < waiting.service_key and (not is_same_owner or by.priority < waiting.service_key.priority)


def _bounded(seconds: float) -> float:
    return min(max(seconds, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
