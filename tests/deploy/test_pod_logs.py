"""Lines of a pod's processes reach the output of its container, which runs `ray start --block`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.helm.chart import ROOT, Values, ray_service
from tests.ports import free_port

pytestmark = [pytest.mark.ray, pytest.mark.full, pytest.mark.timeout(300)]
ACTOR = """
import logging, ray
from workers.process import prepare_logging

@ray.remote(num_cpus=0)
class Worker:
    def work(self):
        prepare_logging("worker")
        logging.getLogger("work").warning("at work")

ray.init(address="auto", log_to_driver=False)
ray.get(Worker.remote().work.remote())
"""


def logging_environment(values: Values) -> dict[str, str]:
    """Return what the chart gives to a worker's container about logs."""
    group = ray_service(values)["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    (container,) = group["template"]["spec"]["containers"]
    return {one["name"]: one["value"] for one in container["env"] if "_LOG_" in one["name"]}


def output_of_container(environment: dict[str, str]) -> str:
    """Return what `ray start --block` writes while an actor logs a line."""
    without_rays = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {
        **without_rays,
        **environment,
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    address = f"127.0.0.1:{free_port()}"
    ray = Path(sys.executable).with_name("ray")
    # Short: Ray puts Unix sockets below it, whose paths may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="dh-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        options = [
            "--head",
            "--block",
            f"--port={address.split(':')[1]}",
            f"--temp-dir={folder}",
            "--include-dashboard=false",
            "--node-ip-address=127.0.0.1",
        ]
        with (Path(folder) / "output").open("w+") as output:
            container = subprocess.Popen(
                [ray, "start", *options, "--num-cpus=1", "--object-store-memory=80000000"],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                wait_started(output.name)
                subprocess.run(
                    [sys.executable, "-c", ACTOR],
                    env={**environment, "RAY_ADDRESS": address},
                    capture_output=True,
                    timeout=120,
                    check=True,
                )
                time.sleep(1.0)
            finally:
                container.terminate()
                container.wait(60)
            return Path(output.name).read_text()


def wait_started(output: str) -> None:
    until_s = time.monotonic() + 120
    while "Ray runtime started" not in (text := Path(output).read_text()):
        assert time.monotonic() < until_s, text
        time.sleep(0.2)


def test_lines_of_a_pod_s_processes_are_in_its_own_output() -> None:
    output = output_of_container(logging_environment({"logFormat": "json"}))
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"time"')]
    assert [(line["process"], line["level"], line["message"]) for line in lines] == [
        ("worker", "WARNING", "at work")
    ], output


def test_they_are_not_where_the_chart_leaves_them_to_ray_s_files() -> None:
    """What the test above shows would not show, if this one failed."""
    assert "at work" not in output_of_container(logging_environment({"logsToStderr": False}))
