"""What was promised to clients: bounds and shares that alerts compare with."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.utils import floatToGoString

from deploy.openai.metrics import E2E_BUCKETS_S, ITL_BUCKETS_S, TTFT_BUCKETS_S
from specdec.core.errors import UserError

_BUCKETS_S = {
    "time_to_first_token_seconds": TTFT_BUCKETS_S,
    "inter_token_latency_seconds": ITL_BUCKETS_S,
    "e2e_request_latency_seconds": E2E_BUCKETS_S,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """What was promised to clients.

    Raises:
        UserError: a bound is not a boundary of the histogram's buckets, or a share not between 0 and 1.
    """

    first_token_s: float = 2.5
    """Bound of the time to the first token."""
    next_tokens_s: float = 0.5
    """Bound of the time between two deliveries of one stream.

    A door with many streams delivers each of them every quarter of a second (`http.max_deliveries_per_s`): a
    bound below that would blame that pacing.
    """
    share_in_time: float = 0.95
    """Share that has to be within each bound."""
    share_answered: float = 0.999
    """Share of requests for text that must not fail for a reason of ours."""

    def __post_init__(self) -> None:
        _check_boundary("first token", self.first_token_s, TTFT_BUCKETS_S)
        _check_boundary("next tokens", self.next_tokens_s, ITL_BUCKETS_S)
        for name, share in (("in time", self.share_in_time), ("answered", self.share_answered)):
            if not 0 < share < 1:
                raise UserError(f"the share {name} is {share:g}: it must lie between 0 and 1, both excluded")

    @property
    def first_token_bound(self) -> str:
        """`first_token_s` as Prometheus writes it."""
        return floatToGoString(self.first_token_s)

    @property
    def next_tokens_bound(self) -> str:
        """`next_tokens_s` as Prometheus writes it."""
        return floatToGoString(self.next_tokens_s)


def _check_boundary(name: str, bound_s: float, boundaries: tuple[float, ...]) -> None:
    if bound_s not in boundaries:
        allowed = ", ".join(f"{boundary:g}" for boundary in boundaries)
        raise UserError(
            f"the bound of the {name} is {bound_s:g} s, which is not a boundary of the histogram: take one "
            f"of {allowed}"
        )


DEFAULT_OBJECTIVES = Objectives()


def boundaries_s(name: str) -> tuple[str, ...]:
    """Return the bucket boundaries of a histogram, as Prometheus writes them."""
    return tuple(floatToGoString(boundary) for boundary in _BUCKETS_S[name])
