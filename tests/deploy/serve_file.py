"""A Serve config, deployed for real; run by `test_serve_deploy.py`.

python tests/deploy/serve_file.py MODELS PORT SERVE_CONFIG NODES

Ray nodes of this machine stand for pods or machines. NODES says which, the head first, in JSON:
[{"pool", "num_cpus", "num_gpus"}].
Ray asks for its token, which is in the environment (RAY_AUTH_MODE, RAY_AUTH_TOKEN).
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import yaml

from cluster.application import COORDINATOR, DRAFT_POOL
from deploy.application import APPLICATION, INGRESS
from tests.ports import free_port

KEY = "a-key-of-the-test"
_START_S = 240.0


def start_nodes(temp: Path, kinds: list[dict[str, Any]]) -> Any:
    from ray.cluster_utils import Cluster

    head, *others = [
        {"labels": {"pool": kind.pop("pool")}, "object_store_memory": 80 << 20, **kind} for kind in kinds
    ]
    head |= {"include_dashboard": True, "dashboard_port": free_port(), "temp_dir": str(temp / "ray")}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    for node in others:
        nodes.add_node(**node)
    return nodes


def deploy(config: dict[str, Any], dashboard: str) -> None:
    """Let Ray's own command send it, as it is sent by KubeRay's operator, too."""
    serve = Path(sys.executable).with_name("serve")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file, sort_keys=False)
        file.flush()
        done = subprocess.run(
            [str(serve), "deploy", file.name, "--address", dashboard],
            capture_output=True,
            text=True,
            timeout=_START_S,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def wait(url: str, wanted: str) -> str:
    """Return the application's message when it has come to a state, and answers."""
    from ray import serve

    until_s = time.monotonic() + _START_S
    while True:
        overview = serve.status().applications.get(APPLICATION)
        if overview is not None and overview.status == wanted and httpx.get(f"{url}/health").is_success:
            return overview.message
        messages = overview and [overview.status, overview.message, overview.deployments]
        assert time.monotonic() < until_s, messages
        assert overview is None or wanted == "DEPLOY_FAILED" or overview.status != "DEPLOY_FAILED", messages
        time.sleep(0.25)


def nodes_of_actors() -> dict[str, list[tuple[str, str]]]:
    """Pool and id of the node of each actor, by class; replicas and workers."""
    import ray

    pools = {node["NodeID"]: node["Labels"]["pool"] for node in ray.nodes()}
    found: dict[str, list[tuple[str, str]]] = {}
    for actor in ray._private.state.actors().values():
        if actor["State"] == "ALIVE":
            node = actor["Address"]["NodeID"]
            found.setdefault(actor["ActorClassName"].rpartition(":")[2], []).append((pools[node], node))
    return found


def assert_placed(settings: dict[str, Any]) -> None:
    """What the config asks for is there, in its pool; the ranks of a target group share a node."""
    cluster = settings["cluster"]
    num_groups = cluster["target_groups"].get("num_groups", 1)
    num_ranks = settings["target"].get("tensor_parallel_size", 1)
    num_drafters = cluster["draft_pool"].get("num_workers", 1)
    places = nodes_of_actors()
    replicas = (
        (INGRESS, "ingress", 1),
        (COORDINATOR, "target", num_groups),
        (DRAFT_POOL, "draft", num_drafters),
    )
    for part, pool, count in replicas:
        found = [node for actor, nodes in places.items() if part in actor for node in nodes]
        assert [where for where, _ in found] == [pool] * count, (part, found)
    ranks = Counter((*places["TargetWorkerProcess"], *places.get("RankWorkerProcess", ())))
    assert list(ranks.values()) == [num_ranks] * num_groups, ranks
    assert {pool for pool, _ in ranks} == {"target"}, ranks
    drafters = Counter(places["DraftWorkerProcess"])
    assert sum(drafters.values()) == num_drafters, drafters
    assert {pool for pool, _ in drafters} == {"draft"}, drafters


def ask(url: str, key: str | None) -> httpx.Response:
    body = {"model": "m", "prompt": [5, 6, 7, 8], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60.0)


def nodes_of_coordinators() -> set[str]:
    places = nodes_of_actors()
    return {node for actor, found in places.items() if COORDINATOR in actor for _, node in found}


def assert_updated_on_the_spare_node(config: dict[str, Any], url: str, dashboard: str) -> None:
    """A changed config while a client asks on: the next group serves before the one before ends."""
    before = nodes_of_coordinators()
    answers: list[int | str] = []
    has_ended = threading.Event()

    def ask_on() -> None:
        while not has_ended.is_set():
            try:
                answers.append(ask(url, KEY).status_code)
            except httpx.HTTPError as error:
                answers.append(repr(error))

    client = threading.Thread(target=ask_on, daemon=True)
    client.start()
    changed = copy.deepcopy(config)
    changed["applications"][0]["args"]["config"]["scheduler"] = {"max_num_seqs": 8}
    deploy(changed, dashboard)
    until_s = time.monotonic() + _START_S
    while nodes_of_coordinators() & before:
        assert time.monotonic() < until_s, (before, nodes_of_coordinators())
        time.sleep(0.25)
    wait(url, "RUNNING")
    has_ended.set()
    client.join(60.0)
    assert set(answers) == {200}, Counter(answers)


def scenario(config: dict[str, Any], url: str, dashboard: str) -> None:
    assert httpx.put(f"{dashboard}/api/serve/applications/", json=config).status_code == 401
    deploy(config, dashboard)
    wait(url, "RUNNING")
    assert ask(url, None).status_code == 401
    answer = ask(url, KEY)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 12
    assert_placed(config["applications"][0]["args"]["config"])

    wrong = copy.deepcopy(config)
    wrong["applications"][0]["args"]["config"]["target"]["dtyp"] = "float32"
    deploy(wrong, dashboard)
    message = wait(url, "DEPLOY_FAILED")
    assert "target.dtyp: unknown key; did you mean dtype?" in message, message
    again = ask(url, KEY)
    assert again.status_code == 200, again.text
    assert again.json()["choices"] == answer.json()["choices"]
    if config["applications"][0]["args"]["config"]["cluster"].get("updates") == "surge":
        assert_updated_on_the_spare_node(config, url, dashboard)


def main() -> None:
    models, port, text, kinds = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    temp = Path(tempfile.mkdtemp(prefix="dhsf", dir="/tmp"))
    (temp / "ray").mkdir()
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_TMPDIR": str(temp),
    }
    import ray
    from ray import serve

    config = yaml.safe_load(text)
    # Nodes with one address cannot have a proxy each, and port and keys are the test's own.
    config["proxy_location"] = "HeadOnly"
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    keys = models / "api-keys"
    keys.write_text(f"{KEY}\n")
    config["applications"][0]["args"]["config"]["http"]["api_keys_file"] = str(keys)
    nodes = start_nodes(temp, kinds)
    try:
        ray.init(address=nodes.address, log_to_driver=False)
        scenario(config, f"http://127.0.0.1:{port}", f"http://{nodes.webui_url}")
        print("deployed, placed, asked, and kept")
        serve.shutdown()
    finally:
        ray.shutdown()
        nodes.shutdown()
        shutil.rmtree(temp, ignore_errors=True)


if __name__ == "__main__":
    main()
