"""A target of two ranks on two Ray nodes of this machine; run by `test_ranks_in_cluster.py`.

python tests/cluster/two_nodes.py TARGET_FOLDER
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from cluster.config import BundleConfig, ClusterConfig, MembershipConfig, TargetGroupsConfig
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from specdec.scheduling.config import SchedulerConfig
from specdec.transport.config import ChannelConfig
from tests.cluster.test_running_cluster import Streams, metric, requests, with_service, worker


def engine_config(folder: str, num_ranks: int) -> EngineConfig:
    return EngineConfig(
        target=ModelConfig(
            model=folder, num_threads=1, tensor_parallel_size=num_ranks, compile=CompileConfig(mode="off")
        ),
        speculative_config=SpeculativeConfig(method="ngram", prompt_lookup_min=1),
        cache=CacheConfig(num_blocks=256, block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )


CLUSTER = ClusterConfig(
    namespace="drafthouse-two-nodes",
    target_groups=TargetGroupsConfig(
        bundle=BundleConfig(num_cpus=0, resources={"target_slot": 1}), strategy="STRICT_SPREAD"
    ),
    channels=ChannelConfig(bind="auto"),
    membership=MembershipConfig(lease_s=3.0, renew_s=0.25),
    drain_timeout_s=2.0,
)


def start_two_nodes(temp: Path) -> Any:
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {
        "num_cpus": 1,
        "resources": {"target_slot": 1},
        "object_store_memory": 80 << 20,
        "include_dashboard": False,
    }
    nodes = Cluster(initialize_head=True, head_node_args={**node, "temp_dir": str(temp / "ray")})
    del node["include_dashboard"]
    nodes.add_node(**node)
    return nodes


def node_of(role: str) -> str:
    import ray

    actor: Any = worker(CLUSTER, role)
    info = ray._private.state.actors(actor._actor_id.hex())
    return str(info["Address"]["NodeID"])


def main() -> None:
    temp = Path(tempfile.mkdtemp(prefix="dh2n", dir="/tmp"))
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

    nodes = start_two_nodes(temp)
    try:
        ray.init(address=nodes.address, log_to_driver=False)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        cluster = resolve(CLUSTER)
        assert cluster.channels.bind == "node"
        serve.run(build_application(engine_config(sys.argv[1], 2), cluster), name="two", route_prefix=None)
        assert node_of("target") != node_of("rank-target")
        compare(cluster)
        print("two nodes, same tokens")
        serve.shutdown()
        ray.shutdown()
    finally:
        nodes.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


def compare(cluster: ClusterConfig) -> None:
    wanted = requests(4, max_tokens=40, name="two")
    expected: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    with Engine(engine_config(sys.argv[1], 1)) as engine:
        for request in wanted:
            engine.add_request(request)
        while engine.has_work:
            for output in engine.step():
                expected[output.request_id].extend(output.token_ids)

    async def scenario(service: object) -> None:
        streams = Streams(service, wanted)
        await streams.finish()
        assert streams.tokens == expected
        await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > 0)

    with_service(cluster, scenario, num_drafters=0)


if __name__ == "__main__":
    main()
