"""What a controller says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from specdec.scheduling.speculation.modes import OverlapMode

Reason = Literal[
    "configured",
    "gain",
    "no_gain",
    "measured_slower",
    "latency_target",
    "requested",
    "probing",
    "auditing",
    "stretching",
    "comparing",
    "idle",
]
"""Why speculation is as it is. configured: it is fixed; gain / no_gain: it is expected to make rounds worth
more / less; measured_slower: expected to gain, but measured rounds say otherwise; latency_target: somebody's
`slo` forbids longer rounds; requested: on for requests that have a k of their own, and for no others;
probing: off, and trying for a few rounds whether that is still right; auditing: on, and looking for a few
rounds how fast it goes without; stretching: on, with longer drafts for a few rounds than are thought best;
comparing: looking for a few rounds how fast another mode goes; idle: nothing has been decided yet."""
Bound = Literal["none", "slo", "batch_size"]
"""What keeps k, as chosen but for trials, from being larger. slo: longer drafts are expected to bring more,
but to make rounds longer than somebody's `slo.itl_ms`; batch_size: k is what
`num_speculative_tokens_per_batch_size` allows at most with so many requests; none: neither of them."""

IN_WORDS: Mapping[Reason, str] = {
    "configured": "k is fixed by the configuration",
    "gain": "drafting is expected to bring more tokens per second than plain decoding",
    "no_gain": "drafting is expected to bring no more tokens per second than plain decoding",
    "measured_slower": "drafting was expected to gain, but rounds with it have been slower",
    "latency_target": "every round with drafts would be longer than somebody's slo.itl_ms",
    "requested": "drafting only for requests that ask for it themselves",
    "probing": "off, but tried for a few rounds to see whether that is still right",
    "auditing": "on, but left out for a few rounds to see how fast it goes without",
    "stretching": "on, with longer drafts for a few rounds to see whether they are worth it",
    "comparing": "in another mode for a few rounds to see whether that is faster",
    "idle": "nothing has been decided yet",
}
BOUNDS_IN_WORDS: Mapping[Bound, str] = {
    "slo": "longer drafts would break somebody's slo.itl_ms",
    "batch_size": "no more is allowed by num_speculative_tokens_per_batch_size",
}
"""Without `none`, of which there is nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerState:
    """What was decided last, why, and by which estimates. Times are seconds, rates are tokens per second."""

    mode: OverlapMode = "lockstep"
    is_speculating: bool = False
    reason: Reason = "idle"
    bounded_by: Bound = "none"
    mean_num_draft_tokens: float = 0.0
    """Mean k over the requests of the last decision."""
    num_requests_by_k: tuple[int, ...] = ()
    """Entry k: how many of these requests were given k draft tokens."""
    goodput_on: float = 0.0
    """Expected tokens per second with speculation, in its best mode."""
    goodput_off: float = 0.0
    """Expected tokens per second without, whatever requests ask for."""
    goodput_by_mode: tuple[tuple[OverlapMode, float], ...] = ()
    """Expected tokens per second in each mode that may be chosen."""
    draft_s: float = 0.0
    """Expected T_draft of the choice."""
    verify_s: float = 0.0
    """Expected T_verify of the choice."""
    round_s: float = 0.0
    """Expected time of a round."""
    acceptance: tuple[float, ...] = ()
    """Mean expected acceptance by position."""
    pool_worth: float | None = None
    """Goodput with speculation over goodput without, the mean of the last minutes. At 1 or below, the
    drafters are not worth their devices. None: nobody compares."""
    num_switches: int = 0
    """How often speculation was switched on or off, or its mode changed."""
    num_probe_rounds: int = 0
    num_audit_rounds: int = 0
    num_stretch_rounds: int = 0
    num_comparison_rounds: int = 0

    def gauges(self) -> Mapping[str, float]:
        """Return values by metric name, without prefix."""
        values: dict[str, float] = {
            "speculation_on": float(self.is_speculating),
            "speculation_mean_num_draft_tokens": self.mean_num_draft_tokens,
            "speculation_goodput_on": self.goodput_on,
            "speculation_goodput_off": self.goodput_off,
            "speculation_expected_draft_seconds": self.draft_s,
            "speculation_expected_verify_seconds": self.verify_s,
            "speculation_expected_round_seconds": self.round_s,
            "speculation_switches": self.num_switches,
            "speculation_probe_rounds": self.num_probe_rounds,
            "speculation_audit_rounds": self.num_audit_rounds,
            "speculation_stretch_rounds": self.num_stretch_rounds,
            "speculation_comparison_rounds": self.num_comparison_rounds,
            f'speculation_state{{mode="{self.mode}",reason="{self.reason}"}}': 1.0,
        }
        if self.pool_worth is not None:
            values["speculation_pool_worth"] = self.pool_worth
        for num_draft_tokens, count in enumerate(self.num_requests_by_k):
            values[f'speculation_chosen_num_draft_tokens{{k="{num_draft_tokens}"}}'] = count
        for position, acceptance in enumerate(self.acceptance):
            values[f'speculation_expected_acceptance{{position="{position}"}}'] = acceptance
        return values
