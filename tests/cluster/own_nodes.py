"""Two target groups and a draft pool over four Ray nodes of this machine; run by `test_ranks_in_cluster.py`.

python tests/cluster/own_nodes.py TARGET_FOLDER DRAFT_FOLDER

Each group of two ranks has to be on a node of its own, and the draft workers on the node that is left. Then a
node with a target group dies, and the group comes back on one that joins.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from cluster.config import BundleConfig, ClusterConfig, DraftPoolConfig, MembershipConfig, TargetGroupsConfig
from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from specdec.scheduling.config import SchedulerConfig
from specdec.transport.config import ChannelConfig
from tests.cluster.running_service import Streams, metric, requests, with_service

SLOT = {"num_cpus": 0, "resources": {"slot": 1}}
CLUSTER = ClusterConfig(
    namespace="drafthouse-own-nodes",
    target_groups=TargetGroupsConfig(num_groups=2, bundle=BundleConfig.model_validate(SLOT)),
    draft_pool=DraftPoolConfig(num_workers=2, bundle=BundleConfig.model_validate(SLOT), own_nodes=True),
    channels=ChannelConfig(bind="auto"),
    membership=MembershipConfig(lease_s=5.0, renew_s=0.5),
    drain_timeout_s=2.0,
)
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}


def engine_config(target: str, draft: str) -> EngineConfig:
    eager = CompileConfig(mode="off")
    return EngineConfig(
        target=ModelConfig(model=target, num_threads=1, tensor_parallel_size=2, compile=eager),
        speculative_config=SpeculativeConfig(
            method="draft_model",
            model=draft,
            num_threads=1,
            compile=eager,
            num_speculative_tokens=3,
            controller="fixed",
        ),
        cache=CacheConfig(num_blocks=256, block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )


def start_nodes(temp: Path) -> tuple[Any, list[Any]]:
    """The head, which has no place for models, and three nodes of four places."""
    from ray.cluster_utils import Cluster

    head = NODE | {"include_dashboard": False, "temp_dir": str(temp / "ray")}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    return nodes, [nodes.add_node(**NODE, resources={"slot": 4}) for _ in range(3)]


def workers_by_node() -> dict[str, list[str]]:
    """Kinds of the live workers on each node."""
    import ray

    kinds = {"TargetWorkerProcess": "target", "RankWorkerProcess": "rank", "DraftWorkerProcess": "draft"}
    found: defaultdict[str, list[str]] = defaultdict(list)
    for actor in ray._private.state.actors().values():
        kind = kinds.get(actor["ActorClassName"].rpartition(":")[2])
        if actor["State"] == "ALIVE" and kind is not None:
            found[actor["Address"]["NodeID"]].append(kind)
    return {node: sorted(kinds) for node, kinds in found.items()}


def require_places(limit_s: float) -> dict[str, list[str]]:
    """Wait until every group has a node of its own, and the draft pool another; return who is where."""
    until_s = time.monotonic() + limit_s
    while True:
        places = workers_by_node()
        if sorted(places.values()) == [["draft", "draft"], ["rank", "target"], ["rank", "target"]]:
            return places
        assert time.monotonic() < until_s, places
        time.sleep(0.25)


def main() -> None:
    temp = Path(tempfile.mkdtemp(prefix="dhon", dir="/tmp"))
    (temp / "ray").mkdir()
    os.environ |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_TMPDIR": str(temp),
    }
    import ray
    from ray import serve

    from cluster.application import build_application, resolve

    engine = engine_config(sys.argv[1], sys.argv[2])
    nodes, machines = start_nodes(temp)
    try:
        ray.init(address=nodes.address, log_to_driver=False)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        cluster = resolve(CLUSTER)
        refuse_too_much(engine, cluster)
        serve.run(build_application(engine, cluster), name="own", route_prefix=None)
        places = require_places(0.0)
        print("placed:", places)
        with_service(cluster, stream_on, num_drafters=2)
        lose_a_target_node(nodes, machines, places)
        require_places(240.0)
        with_service(cluster, stream_on, num_drafters=2)
        print("each on nodes of its own, before and after")
        serve.shutdown()
        ray.shutdown()
    finally:
        nodes.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


def refuse_too_much(engine: EngineConfig, cluster: ClusterConfig) -> None:
    from cluster.application import build_application

    groups = cluster.target_groups.model_copy(update={"num_groups": 5})
    with pytest.raises(ResourceError, match="draft worker 1 of 2 needs 1 slot on one node") as refusal:
        build_application(engine, cluster.model_copy(update={"target_groups": groups}))
    text = str(refusal.value)
    assert text.count("has 0 slot, free 0 slot, lacks 1 slot") == 1, text
    assert text.count("has a part of a target group, and draft_pool.own_nodes is true") == 3, text


def lose_a_target_node(nodes: Any, machines: list[Any], places: dict[str, list[str]]) -> None:
    import ray

    # Ray takes any node of this address for the driver's, and would not let it go.
    here = ray._private.worker.global_worker.node.raylet_socket_name
    with_target = [machine for machine in machines if "target" in places[machine.node_id]]
    (lost, *_) = [machine for machine in with_target if machine.raylet_socket_name != here]
    nodes.remove_node(lost, allow_graceful=False)
    nodes.add_node(**NODE, resources={"slot": 4})


async def stream_on(service: object) -> None:
    await metric(service, "coordinators", lambda value: value == 2)
    streams = Streams(service, requests(4, max_tokens=20, name=f"own-{time.monotonic_ns()}"))
    await streams.finish()
    assert {last.finish_reason for last in streams.last.values()} == {"length"}


if __name__ == "__main__":
    main()
