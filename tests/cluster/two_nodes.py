"""A target over two Ray nodes of this machine; run by `test_ranks_in_cluster.py`.

python tests/cluster/two_nodes.py TARGET_FOLDER TENSOR_PARALLEL_SIZE PIPELINE_PARALLEL_SIZE KILL_OR_STOP AUTH

Without stages each node has a rank, with two stages each has a stage. A rank that is not on the node of the
target worker is killed, or stopped so that nothing closes its links, while streams run. AUTH is Ray's mode:
disabled, or token, which all nodes share and nobody else has.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
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
from tests.cluster.live_workers import worker, workers
from tests.cluster.running_service import Streams, metric, requests, with_service
from tests.strangers import require_token

NUM_NODES = 2


def engine_config(folder: str, width: int = 1, stages: int = 1) -> EngineConfig:
    return EngineConfig(
        target=ModelConfig(
            model=folder,
            num_threads=1,
            tensor_parallel_size=width,
            pipeline_parallel_size=stages,
            pipeline_micro_batch_tokens=2,
            compile=CompileConfig(mode="off"),
        ),
        speculative_config=SpeculativeConfig(method="ngram", controller="fixed", prompt_lookup_min=1),
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


def start_two_nodes(temp: Path, num_ranks: int) -> Any:
    from ray.cluster_utils import Cluster

    node: dict[str, Any] = {
        "num_cpus": 1,
        "resources": {"target_slot": num_ranks // NUM_NODES},
        "object_store_memory": 80 << 20,
        "include_dashboard": False,
    }
    nodes = Cluster(initialize_head=True, head_node_args={**node, "temp_dir": str(temp / "ray")})
    del node["include_dashboard"]
    nodes.add_node(**node)
    return nodes


def state_of(actor: Any) -> Any:
    import ray

    return ray._private.state.actors(actor._actor_id.hex())


def node_of(actor: Any) -> str:
    return str(state_of(actor)["Address"]["NodeID"])


def main() -> None:
    temp = Path(tempfile.mkdtemp(prefix="dh2n", dir="/tmp"))
    (temp / "ray").mkdir()
    folder, fate, auth = sys.argv[1], sys.argv[4], sys.argv[5]
    width, stages = int(sys.argv[2]), int(sys.argv[3])
    token = secrets.token_hex(32)
    os.environ |= {
        "RAY_AUTH_MODE": auth,
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_TMPDIR": str(temp),
    }
    import ray
    from ray import serve

    from cluster.application import build_application, resolve

    nodes = start_two_nodes(temp, width * stages)
    try:
        ray.init(address=nodes.address, log_to_driver=False)
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        cluster = resolve(CLUSTER)
        assert cluster.channels.bind == "node"
        application = build_application(engine_config(folder, width, stages), cluster)
        serve.run(application, name="two", route_prefix=None)
        compare(cluster, folder, width * stages // NUM_NODES, end_abruptly if fate == "kill" else stop)
        if auth == "token":
            require_token(nodes.address, token)
        print("two nodes, same tokens")
        serve.shutdown()
        ray.shutdown()
    finally:
        nodes.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


def ranks_elsewhere() -> list[Any]:
    """Ranks that are not on the node of the target worker, which is rank 0."""
    here = node_of(worker(CLUSTER, "target"))
    return [actor for actor in workers(CLUSTER, "rank-target") if node_of(actor) != here]


def end_abruptly(rank: Any) -> None:
    import ray

    ray.kill(rank, no_restart=True)


def stop(rank: Any) -> None:
    """Only its heartbeat tells that it does not run any more."""
    os.kill(state_of(rank)["Pid"], signal.SIGSTOP)


def compare(cluster: ClusterConfig, folder: str, num_elsewhere: int, harm: Callable[[Any], None]) -> None:
    wanted, later = (requests(4, max_tokens=length, name=str(length)) for length in (40, 150))
    expected: dict[str, list[int]] = {request.request_id: [] for request in (*wanted, *later)}
    with Engine(engine_config(folder)) as engine:
        for request in (*wanted, *later):
            engine.add_request(request)
        while engine.has_work:
            for output in engine.step():
                expected[output.request_id].extend(output.token_ids)

    async def scenario(service: object) -> None:
        victims = ranks_elsewhere()
        assert len(victims) == num_elsewhere
        streams = Streams(service, wanted)
        await streams.finish()
        await metric(service, "spec_decode_num_accepted_tokens", lambda value: value > 0)
        interrupted = Streams(service, later)
        await interrupted.all_have_begun()
        harm(victims[-1])
        await interrupted.finish()
        assert {**streams.tokens, **interrupted.tokens} == expected
        await metric(service, "target_losses", lambda value: value == 1)
        assert len(ranks_elsewhere()) == num_elsewhere

    with_service(cluster, scenario, num_drafters=0)


if __name__ == "__main__":
    main()
