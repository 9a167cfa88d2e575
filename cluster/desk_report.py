"""What a coordinator says of itself: metrics, answers to pings, its status."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from specdec.core.ids import Epoch, RequestId
from specdec.core.series import name_of
from specdec.transport.messages import Pong
from specdec.transport.status import TargetGroupStatus

_OF_THE_MOMENT = frozenset(
    {
        "num_requests_running",
        "queue_wait_seconds",
        "kv_cache_usage_perc",
        "target_utilization",
        "draft_utilization",
        "local_draft_utilization",
        "draft_pool_usage_perc",
        "drafter_num_requests_running",
    }
)
"""Of an engine's metrics, whatever their labels: what is 0 when it is not there any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """How things are at a desk."""

    has_target: bool
    is_draining: bool
    is_closing: bool
    num_streams: int
    num_submitted: int
    """Of these, those that the engine has not been given yet."""
    most_without_target: float

    def metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return an engine's metrics, and others, as they are now.

        While there is no target, nothing runs, and all that are here wait: no engine is there to say so.
        What the last one said of how things were is over.
        """
        if not self.has_target:
            at_rest = dict.fromkeys((one for one in values if name_of(one) in _OF_THE_MOMENT), 0.0)
            return {**values, **at_rest, "num_requests_waiting": self.num_streams}
        num_waiting = values.get("num_requests_waiting", 0) + self.num_submitted
        return {**values, "num_requests_waiting": num_waiting}

    def pong(
        self, nonce: int, active: tuple[tuple[RequestId, Epoch], ...], metrics: Mapping[str, float]
    ) -> Pong:
        """Return an answer to a ping; `metrics` are those of now."""
        most = self.most_without_target
        return Pong(
            nonce=nonce,
            active=active,
            num_running=int(metrics.get("num_requests_running", 0)),
            num_waiting=int(metrics["num_requests_waiting"]),
            draining=self.is_draining,
            closing=self.is_closing,
            without_target=not self.has_target,
            max_streams=0 if math.isinf(most) else int(most),
        )

    def status(self, status: TargetGroupStatus, num_continued: int) -> TargetGroupStatus:
        """Return what the last engine said of itself, as far as it still holds.

        `num_continued` streams began elsewhere.
        """
        is_serving = self.has_target
        return msgspec.structs.replace(
            status,
            is_serving=is_serving,
            is_draining=self.is_draining,
            num_running=status.num_running if is_serving else 0,
            kv_cache_usage=status.kv_cache_usage if is_serving else 0.0,
            utilization=status.utilization if is_serving else 0.0,
            num_waiting=status.num_waiting + self.num_submitted if is_serving else self.num_streams,
            num_continued=num_continued,
        )
