"""Every number that a cluster exports, by name without prefix: its engines' and its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from specdec.core.series import Series, name_of
from specdec.engine.metrics.series import ENGINE_SERIES
from specdec.transport.base import PeerId

OF_EACH_GROUP = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "rounds",
    "round_time_seconds",
    "generation_tokens",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)
"""Of the engines' series those that are exported for each target group, too: what shows an uneven load."""
_GROUP_PREFIX = "target_group_"
_OF_THE_INGRESS = frozenset(
    {
        "failovers",
        "lost_streams",
        "routed_prefix_tokens",
        "stale_frames_dropped",
        "unexpected_messages_dropped",
    }
)
"""Counted there, whoever else can be reached."""
_OF_THE_DIRECTORY = frozenset({"ingress_losses"})
"""Counted there: a door that has not heard from it yet does not know that there were none."""

CLUSTER_SERIES: Mapping[str, Series] = {
    **ENGINE_SERIES,
    **{
        _GROUP_PREFIX + name: ENGINE_SERIES[name]._replace(
            help=f"Of one target group: {ENGINE_SERIES[name].help}", labels=("target_group",)
        )
        for name in OF_EACH_GROUP
    },
    "coordinators": Series("gauge", "Target groups that can be reached."),
    "coordinators_with_target": Series(
        "gauge", "Target groups that can be reached and have a target: others have lost it and load another."
    ),
    "target_groups_wanted": Series(
        "gauge", "Target groups that there should be: as configured, or as autoscaling has decided last."
    ),
    "draft_workers_wanted": Series(
        "gauge", "Draft workers that there should be: as configured, or as autoscaling has decided last."
    ),
    "num_workers": Series(
        "gauge",
        "Workers by model and by what has become of compiling its forward.",
        labels=("part", "compile"),
    ),
    "scales_to_zero": Series(
        "gauge",
        "1 where there may be no workers of this part while nobody asks (min_groups or min_workers is 0), "
        "else 0.",
        labels=("part",),
    ),
    "num_requests_without_group": Series(
        "gauge", "Requests that wait at an ingress, because no target group is there for them."
    ),
    "target_losses": Series("counter", "Target workers that were lost."),
    "target_recovery_seconds": Series("counter", "Time without a target worker."),
    "replays": Series("counter", "Requests that went on with a new target worker."),
    "failovers": Series("counter", "Requests that went on with another coordinator."),
    "request_epochs": Series(
        "counter",
        "Submissions of requests to coordinators, by epoch: 0 is the first attempt of each, 3+ the fourth "
        "and all later ones.",
        labels=("epoch",),
    ),
    "routed_requests": Series(
        "counter",
        "Requests by why they went to their target group, where there are several: it had read a part of the "
        "prompt (prefix), no group had (new), one had but was too busy (balance).",
        labels=("reason",),
    ),
    "routed_prefix_tokens": Series(
        "counter", "Prompt tokens that the chosen target group had been sent before."
    ),
    "stale_frames_dropped": Series("counter", "Messages about epochs of requests that are over."),
    "unexpected_messages_dropped": Series(
        "counter", "Messages of coordinators of a kind that is not for an ingress."
    ),
    "lost_streams": Series("counter", "Requests that ended because no coordinator was there for too long."),
    "ingress_losses": Series(
        "counter",
        "Ingresses that were gone without having left: killed, hung, or out of reach. What they had begun is "
        "in no other series.",
    ),
    "directory_silent_seconds": Series(
        "gauge",
        "How long the directory, which is on Ray's head node, has not answered. While it does not, nothing "
        "that dies is replaced.",
    ),
    "channel_messages_dropped": Series(
        "counter",
        "Messages between ingresses and coordinators, and among ingresses, dropped, by who dropped them and "
        "by reason.",
        labels=("dropped_by", "reason"),
    ),
}


def channel_dropped_series(
    dropped_by: Literal["ingress", "coordinator"], dropped: Mapping[str, int]
) -> dict[str, float]:
    """Return what an ingress or a coordinator has dropped between them, by reason, as it is exported."""
    return {
        f'channel_messages_dropped{{dropped_by="{dropped_by}",reason="{reason}"}}': float(count)
        for reason, count in list(dropped.items())
    }


def of_each_group(snapshots: Mapping[PeerId, Mapping[str, float]]) -> dict[str, float]:
    """Return what is exported for each target group, by the group's name, from its engine's snapshot."""
    return {
        f'{_GROUP_PREFIX}{name}{{target_group="{group}"}}': snapshot[name]
        for group, snapshot in snapshots.items()
        for name in OF_EACH_GROUP
        if name in snapshot
    }


def is_counter(series: str) -> bool:
    """Whether a key of a snapshot is that of something that grows; one that is not known here is not."""
    known = CLUSTER_SERIES.get(name_of(series))
    return known is not None and known.kind != "gauge"


def is_of_one_group(series: str) -> bool:
    """Whether a key of a snapshot is that of one target group."""
    return series.startswith(_GROUP_PREFIX)


def counted_from_zero(values: Mapping[str, float]) -> dict[str, float]:
    """Return a snapshot with 0 for what has been counted never.

    Whoever reads a counter that appears at 1 cannot tell that it has grown.

    Args:
        values: of all coordinators; none of them, none of theirs.
    """
    counting = CLUSTER_SERIES if values else _OF_THE_INGRESS
    zeros = {
        name: 0.0
        for name, series in CLUSTER_SERIES.items()
        if name in counting and series.kind != "gauge" and not series.labels and name not in _OF_THE_DIRECTORY
    }
    return {**zeros, **values}
