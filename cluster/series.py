"""Every number that a cluster exports, by name without prefix: its engines' and its own."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.core.series import Series
from specdec.engine.series import ENGINE_SERIES

CLUSTER_SERIES: Mapping[str, Series] = {
    **ENGINE_SERIES,
    "coordinators": Series("gauge", "Target groups that can be reached."),
    "num_workers": Series("gauge", "Workers by model and by what has become of compiling its forward."),
    "target_losses": Series("counter", "Target workers that were lost."),
    "target_recovery_seconds": Series("counter", "Time without a target worker."),
    "replays": Series("counter", "Requests that went on with a new target worker."),
    "failovers": Series("counter", "Requests that went on with another coordinator."),
    "stale_frames_dropped": Series("counter", "Messages about epochs of requests that are over."),
    "unexpected_messages_dropped": Series(
        "counter", "Messages of coordinators of a kind that is not for an ingress."
    ),
    "lost_streams": Series("counter", "Requests that ended because no coordinator was there for too long."),
    "channel_messages_dropped": Series(
        "counter", "Messages between ingress and coordinators dropped, by reason."
    ),
}
