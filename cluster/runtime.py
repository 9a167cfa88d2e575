"""The few things that processes of a deployment ask Ray about themselves."""

from __future__ import annotations

import uuid
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.util import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.config import BundleConfig
from cluster.placement import ModelRanks
from specdec.transport.base import PeerId
from specdec.transport.config import ChannelConfig
from specdec.transport.zmq import ZmqOptions


def new_peer_id(role: str) -> PeerId:
    """Return an id that no process had before."""
    return PeerId(f"{role}-{uuid.uuid4().hex[:12]}")


def own_placement_group() -> str:
    """Return the id of the placement group of this process's replica; empty where there is none."""
    group = get_current_placement_group()
    return "" if group is None else str(group.id.hex())


def own_application() -> str:
    """Return the name of the Serve application of this process's replica; empty where there is none."""
    try:
        return str(serve.get_replica_context().app_name)
    except RayServeException:
        return ""


def bind_host(config: ChannelConfig) -> str:
    """Where this process's sockets listen. `auto` has been resolved when the application was built."""
    if config.bind == "loopback":
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())


def channel_options(config: ChannelConfig) -> ZmqOptions:
    """The sockets' options."""
    return ZmqOptions(
        max_message_bytes=config.max_message_bytes,
        heartbeat_interval_s=config.heartbeat_interval_s,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
    )


def rank_options(role: str, bundle: BundleConfig, ranks: ModelRanks, namespace: str) -> list[dict[str, Any]]:
    """Actor options of ranks 1, 2, ... of a model; rank 0 is the worker itself."""
    return [
        worker_options(bundle, new_peer_id(f"rank-{role}"), namespace, bundle_index=ranks.bundle_of(rank))
        for rank in range(1, ranks.num_ranks)
    ]


def worker_options(
    bundle: BundleConfig | None, name: PeerId, namespace: str, *, bundle_index: int = 0
) -> dict[str, Any]:
    """Actor options that put a worker into this replica's own placement group.

    One process holds one model: a worker that dies is replaced by its owner, not restarted by Ray, so that
    it gets a new identity. Without a bundle it takes nothing of the group's resources: it works beside
    others.
    """
    options: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "num_cpus": 0.0 if bundle is None else bundle.num_cpus,
        "num_gpus": 0.0 if bundle is None else bundle.num_gpus,
        "resources": {} if bundle is None else dict(bundle.resources),
        "max_restarts": 0,
    }
    group = get_current_placement_group()
    if group is not None:
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle_index
        )
    return options
