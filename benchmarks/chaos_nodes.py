"""Ray nodes on this machine: as root each with a network address of its own, else all with the same one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import psutil

from benchmarks.network import Network, network, why_not

_ATTEMPTS = 3
_LIMIT_S = 300.0
_PORT = 6379
_STORE_BYTES = 80 << 20
_HEAD = 1
_RAYLET = "raylet"
_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
"""Of nodes: one that does not answer is given up after about ten seconds."""


class Nodes(Protocol):
    """A head, which is there from the beginning, and others."""

    @property
    def address(self) -> str:
        """What `ray.init` connects to."""

    @property
    def network(self) -> Network | None:
        """Between them, if they have one; a node is then its host's number."""

    def add(self, resources: Mapping[str, float]) -> Any:
        """Start a node; again where it took longer than Ray waits, which a busy machine is enough for."""

    def kill(self, node: Any) -> None:
        """kill -9 of everything that belongs to a node."""

    def start_ended_again(self) -> int:
        """Start those again whose raylet has ended by itself, as what supervises it would (a pod's restart
        policy): one that hears that it has been given up ends. Return how many that were.
        """

    def end(self) -> None:
        """End all of them; of a head with an address of its own, the network's end does."""


@contextlib.contextmanager
def nodes_of_this_machine(folder: Path, num_others: int) -> Iterator[Nodes]:
    """Have a head, and up to so many others at a time.

    Where each has an address of its own, this thread is on the head meanwhile, and with it whatever thread it
    starts.
    """
    if why_not() is not None:
        yield _NodesAtOneAddress(folder)
        return
    with network(f"dhch{os.getpid()}", 1 + num_others) as made, made.inside(_HEAD):
        yield _NodesOfNetwork(made, folder)


class _NodesAtOneAddress:
    """Everything by the loopback address."""

    network: Network | None = None

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(folder)}
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={**head, "object_store_memory": _STORE_BYTES, "_system_config": _HEALTH_CHECKS},
        )

    @property
    def address(self) -> str:
        address: str = self._cluster.address
        return address

    def add(self, resources: Mapping[str, float]) -> Any:
        for _ in range(_ATTEMPTS - 1):
            with contextlib.suppress(Exception):  # Ray has no type of its own for it
                return self._start(resources)
        return self._start(resources)

    def _start(self, resources: Mapping[str, float]) -> Any:
        return self._cluster.add_node(num_cpus=1, resources=dict(resources), object_store_memory=_STORE_BYTES)

    def kill(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def start_ended_again(self) -> int:
        return 0  # nobody is ever cut off, so none is given up

    def end(self) -> None:
        self._cluster.shutdown()


class _NodesOfNetwork:
    """Each on a host."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network: Network | None = network
        self._made = network
        self._free = [host for host in network.hosts if host != _HEAD]
        self._others: dict[int, list[str]] = {}
        """Hosts with a node, and how it is started."""
        config = f"--system-config={json.dumps(_HEALTH_CHECKS)}"
        head = ["--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={folder}", config]
        self._start(_HEAD, *head, "--num-cpus=0")

    @property
    def address(self) -> str:
        return f"{self._made.address(_HEAD)}:{_PORT}"

    def add(self, resources: Mapping[str, float]) -> int:
        host = self._free.pop(0)
        where = [f"--address={self.address}", "--num-cpus=1", f"--resources={json.dumps(resources)}"]
        self._others[host] = where
        self._start_patiently(host)
        return host

    def _start_patiently(self, host: int) -> None:
        where = self._others[host]
        for _ in range(_ATTEMPTS - 1):
            try:
                self._start(host, *where)
            except (subprocess.SubprocessError, OSError):
                self._made.kill(host)  # what it has started of the node
            else:
                return
        self._start(host, *where)

    def _start(self, host: int, *arguments: str) -> None:
        command = [str(Path(sys.executable).with_name("ray")), "start", *arguments]
        own = [f"--node-ip-address={self._made.address(host)}", f"--object-store-memory={_STORE_BYTES}"]
        subprocess.run(
            self._made.command(host, *command, *own), capture_output=True, check=True, timeout=_LIMIT_S
        )

    def kill(self, node: int) -> None:
        self._made.kill(node)
        self._free.append(node)
        del self._others[node]

    def start_ended_again(self) -> int:
        ended = [host for host in self._others if not self._has_raylet(host)]
        for host in ended:
            self._made.kill(host)  # what it has left
            self._start_patiently(host)
        return len(ended)

    def _has_raylet(self, host: int) -> bool:
        for process in self._made.processes(host):
            with contextlib.suppress(psutil.Error):
                if psutil.Process(process).name() == _RAYLET:
                    return True
        return False

    def end(self) -> None:
        for host in self._made.hosts:
            if host != _HEAD:  # there we are ourselves; what runs there ends with the network
                self._made.kill(host)
