"""A real Prometheus (Debian: `apt-get install prometheus`) beside a metrics endpoint, and its promtool."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.monitoring.rules import rules_yaml

SCRAPE_INTERVAL = "500ms"
WINDOW = "4s"
"""Shortest window over which a rate is worth something at this interval."""
_PATIENCE_S = 60.0

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus on PATH (Debian's package of that name)"
)
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool on PATH (Debian's package prometheus)"
)


@dataclass(frozen=True, slots=True)
class Prometheus:
    """One that runs."""

    url: str
    client: httpx.Client

    def get(self, path: str, **params: str) -> Any:
        """Return the data of an answer of its API."""
        response = self.client.get(f"{self.url}/api/v1/{path}", params=params, timeout=10)
        body = response.json()
        assert body["status"] == "success", f"{params}: {body.get('error')}"
        return body["data"]

    def values(self, expression: str) -> list[float]:
        """Return the values of an expression now, of whatever labels."""
        return [float(series["value"][1]) for series in self.get("query", query=expression)["result"]]

    def wait_for(self, expression: str, patience_s: float = _PATIENCE_S) -> None:
        """Wait until an expression has a value."""
        until_s = time.monotonic() + patience_s
        while not self.values(expression):
            assert time.monotonic() < until_s, f"nothing comes of {expression}"
            time.sleep(0.2)


@contextmanager
def running_prometheus(folder: Path, target: str, rules: str) -> Iterator[Prometheus]:
    """Start one that scrapes `target` as job `drafthouse` and evaluates `rules`.

    `target`: HOST:PORT, with https:// before it where it speaks TLS, by whatever certificate.
    """
    scheme, _, host = target.rpartition("://")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "rules.yaml").write_text(rules)
    (folder / "prometheus.yaml").write_text(
        f"""\
global: {{scrape_interval: {SCRAPE_INTERVAL}, evaluation_interval: 1s}}
rule_files: [rules.yaml]
scrape_configs:
  - job_name: drafthouse
    scheme: {scheme or "http"}
    tls_config: {{insecure_skip_verify: true}}
    static_configs: [{{targets: ["{host}"]}}]
"""
    )
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_ready(process, address, folder / "log")
            with httpx.Client() as client:  # one for all: each loads the certificates of this machine
                yield Prometheus(f"http://{address}", client)
        finally:
            process.terminate()


def _wait_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < until_s, log.read_text()
        try:
            if httpx.get(f"http://{address}/-/ready", timeout=1).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


def promtool(*arguments: object) -> str:
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=250, check=False
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def run_scenarios(folder: Path, scenarios: list[dict[str, object]]) -> str:
    (folder / "rules.yaml").write_text(rules_yaml())
    (folder / "tests.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": scenarios})
    )
    return promtool("test", "rules", folder / "tests.yaml")
