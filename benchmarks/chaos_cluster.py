"""A deployment over several Ray nodes of this machine, and the harm that can be done to it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from benchmarks.chaos_nodes import Nodes, nodes_of_this_machine
from benchmarks.full_disk import can_mount, filled_up, small_disk
from benchmarks.network import Network
from benchmarks.starving import can_starve, starve
from deploy.config import DrafthouseConfig
from deploy.proxies import proxy_environment

_MARK = "DRAFTHOUSE_CHAOS"
_PROBE_TIMEOUT_S = 3.0
_POLL_S = 0.2
_START_S = 900.0
_NODE_START_S = 120
"""Ray's own patience, 15 s, is too short for a busy machine."""
_DISK = "2g"
"""For logs of hours."""
_TARGET_WORKER = "ray::TargetWorkerProcess"
_DRAFT_WORKER = "ray::DraftWorkerProcess"
_RANK = "ray::RankWorkerProcess"
_COORDINATOR = "ray::ServeReplica:drafthouse:Coordinator"
_INGRESS = "ray::ServeReplica:drafthouse:Ingress"
_PROXY = "ray::ProxyActor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is deployed. Nodes are those of the target groups and one of the draft pool, beside the head."""

    num_target_groups: int = 2
    tensor_parallel_size: int = 1
    num_draft_workers: int = 1
    num_ingresses: int = 2
    lease_s: float = 3.0
    step_timeout_s: float = 10.0
    """After which a rank that hangs is taken for dead."""
    proxy_check_s: float = 2.0
    """Between checks of Serve's HTTP proxies; a dead one fails three."""
    health_timeout_s: float = 10.0
    """After which a check of a replica that hangs has failed; it is replaced after three."""

    @property
    def num_processes(self) -> Mapping[str, int]:
        """How many there are of each kind when everything is there."""
        return {
            _TARGET_WORKER: self.num_target_groups,
            _RANK: self.num_target_groups * (self.tensor_parallel_size - 1),
            _DRAFT_WORKER: self.num_draft_workers,
            _COORDINATOR: self.num_target_groups,
            _INGRESS: self.num_ingresses,
            _PROXY: 1,
        }


class ChaosCluster:
    """Between entering and leaving, the deployment runs on nodes of its own; afterwards nothing is left."""

    def __init__(self, shape: Shape, family: Path) -> None:
        """`family` has the folders `target` and `draft`."""
        self.shape = shape
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.config = _config(shape, family.resolve(), port)
        self._places = contextlib.ExitStack()
        self._nodes: Nodes | None = None
        self._target_nodes: list[Any] = []
        self._draft_node: Any = None

    @property
    def url(self) -> str:
        """Of the endpoint."""
        return f"http://127.0.0.1:{self.config.http.port}"

    def __enter__(self) -> Self:
        """Start everything and wait until it serves."""
        # Short: Ray puts Unix sockets below it, whose paths may have 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="dhch", dir="/tmp"))
        if can_mount():  # what is filled up must not be the disk of this machine
            self._places.enter_context(small_disk(self._folder, _DISK))
        (self._folder / "ray").mkdir()
        os.environ |= proxy_environment(
            "python"
        )  # what `drafthouse serve` gives Serve's proxy, and images do
        os.environ |= {
            _MARK: self._mark,
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": str(self.shape.proxy_check_s),
            "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_raylet_start_wait_time_s": str(_NODE_START_S),
            "RAY_TMPDIR": str(self._folder),
            "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        }
        try:
            self._start()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clean_up()

    def _start(self) -> None:
        import ray

        from deploy.deployment import Deployment

        self._nodes = self._places.enter_context(
            nodes_of_this_machine(self._folder / "ray", 1 + self.shape.num_target_groups)
        )
        for _ in range(self.shape.num_target_groups):
            self._add_target_node()
        self._draft_node = self._nodes.add({"draft_slot": self.shape.num_draft_workers})
        ray.init(address=self._nodes.address, log_to_driver=False)
        deployment = Deployment(self.config)
        deployment.start()
        for _ in deployment.wait_ready():
            pass
        until_s = time.monotonic() + _START_S
        while not self.is_whole():
            if time.monotonic() > until_s:
                raise TimeoutError(f"not all there after {_START_S:g} s: {self._count()}")
            time.sleep(_POLL_S)

    def _add_target_node(self) -> None:
        assert self._nodes is not None
        self._target_nodes.append(self._nodes.add({"target_slot": self.shape.tensor_parallel_size}))

    def _clean_up(self) -> None:
        import ray

        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
        with contextlib.suppress(Exception):  # half of it may be dead: what is left is killed below
            ray.shutdown()
            if self._nodes is not None:
                self._nodes.end()
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._places.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _processes(self) -> Iterator[psutil.Process]:
        """All processes of this deployment but our own, whoever their parent is now."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get(_MARK) == self._mark:
                    yield process

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Those that harm is done to, by the beginning of their title. Stopped and dead ones are left out."""
        found: dict[str, list[psutil.Process]] = {title: [] for title in self.shape.num_processes}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                title = next(iter(process.cmdline()), "")
                kind = next((kind for kind in found if title.startswith(kind)), None)
                if (
                    kind is not None
                    and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
                    and process.environ().get(_MARK) == self._mark
                ):
                    found[kind].append(process)
        return found

    def _count(self) -> dict[str, int]:
        return {kind: len(found) for kind, found in self.processes().items()}

    def is_whole(self) -> bool:
        """Whether every process is there, its weights are loaded, and both Serve and the door say so.

        Serve tells of ingresses, of which the door knows but itself: one that is only starting is none yet.
        """
        if self._count() != dict(self.shape.num_processes) or not self._is_running():
            return False
        try:
            response = httpx.get(f"{self.url}/v1/status", timeout=_PROBE_TIMEOUT_S)
        except httpx.HTTPError:
            return False
        if response.status_code != 200:
            return False
        status = response.json()
        groups = status["target_groups"]
        return (
            len(groups) == self.shape.num_target_groups
            and all(group["is_answering"] and group["is_serving"] for group in groups)
            and len(status["draft_workers"]) == self.shape.num_draft_workers
        )

    @staticmethod
    def _is_running() -> bool:
        """Whether no replica of the application is missing, starting or ending, as far as Serve knows."""
        from ray import serve

        from deploy.application import APPLICATION

        deployments = serve.status().applications[APPLICATION].deployments.values()
        return all(set(one.replica_states) == {"RUNNING"} and one.status == "HEALTHY" for one in deployments)

    def start_ended_nodes(self) -> int:
        """Start nodes again that Ray has given up, once they know; return how many that were."""
        assert self._nodes is not None
        return self._nodes.start_ended_again()

    # -- harm

    def kill_draft_worker(self, random: Random) -> None:
        """kill -9."""
        self._kill(_DRAFT_WORKER, random)

    def kill_target_rank(self, random: Random) -> None:
        """kill -9 of any rank of any target."""
        found = self.processes()
        _end(_pick(found[_TARGET_WORKER] + found[_RANK], random))

    def kill_coordinator(self, random: Random) -> None:
        """kill -9."""
        self._kill(_COORDINATOR, random)

    def kill_ingress(self, random: Random) -> None:
        """kill -9."""
        self._kill(_INGRESS, random)

    def kill_proxy(self, random: Random) -> None:
        """kill -9 of Serve's HTTP proxy: every connection breaks."""
        self._kill(_PROXY, random)

    def kill_node(self, random: Random) -> None:
        """Take a node of a target group away, with whatever runs on it, and bring another one."""
        assert self._nodes is not None
        node = random.choice(self._target_nodes)
        self._target_nodes.remove(node)
        num_before = len(self.processes()[_TARGET_WORKER])
        self._nodes.kill(node)
        until_s = time.monotonic() + _PROBE_TIMEOUT_S
        # Ray ends a node's processes soon after the node. If none ends there was none on it.
        while len(self.processes()[_TARGET_WORKER]) >= num_before and time.monotonic() < until_s:
            time.sleep(_POLL_S / 4)
        self._add_target_node()

    def hang_target_rank(self, random: Random) -> None:
        """Stop any rank of any target for good: nothing of it closes, it only does not answer."""
        found = self.processes()
        _stop(_pick(found[_TARGET_WORKER] + found[_RANK], random))

    def hang_ingress(self, random: Random) -> None:
        """Stop an ingress for good: its streams stand still until Serve finds out."""
        _stop(_pick(self.processes()[_INGRESS], random))

    def starve_worker(self, random: Random) -> None:
        """Take the memory of a worker away: the kernel ends it."""
        found = self.processes()
        starve(_pick(found[_TARGET_WORKER] + found[_RANK] + found[_DRAFT_WORKER], random))

    def fill_disk(self, random: Random) -> None:
        """Fill up the disk with Ray's folder for a while; a draft worker dies meanwhile."""
        victim = _pick(self.processes()[_DRAFT_WORKER], random)
        with filled_up(self._folder):
            time.sleep(random.uniform(0.5, 1.5))
            _end(victim)
            time.sleep(random.uniform(0.5, 1.5))

    def slow_drafter(self, random: Random) -> None:
        """Stop a draft worker for a while that is too short to take it for dead."""
        victim = _pick(self.processes()[_DRAFT_WORKER], random)
        self._pause(victim, random.uniform(0.2, 0.6) * self.shape.lease_s)

    def cut_off_coordinator(self, random: Random) -> None:
        """Stop a coordinator until it is given up, then let it come back as a zombie."""
        victim = _pick(self.processes()[_COORDINATOR], random)
        self._pause(victim, random.uniform(1.5, 2.5) * self.shape.lease_s)

    def cut_off_node(self, random: Random) -> None:
        """Pull the plug of a target group's node for a while: it sees nobody, nobody sees it. Longer than a
        lease, and for about as long as it takes Ray to give the node up, so that it does now and then.
        """
        network, host = self._network(), random.choice(self._target_nodes)
        network.isolate(host)
        time.sleep(random.uniform(1.5, 2.5) * self.shape.lease_s)
        network.join(host)

    def cut_off_drafts(self, random: Random) -> None:
        """Lose for a while what target groups and the draft worker send to each other, and nothing else."""
        network = self._network()
        for host in self._target_nodes:
            network.part(host, self._draft_node)
        time.sleep(random.uniform(1.5, 2.5) * self.shape.lease_s)
        for host in self._target_nodes:
            network.reunite(host, self._draft_node)

    def _network(self) -> Network:
        assert self._nodes is not None
        assert self._nodes.network is not None
        return self._nodes.network

    def _kill(self, kind: str, random: Random) -> None:
        _end(_pick(self.processes()[kind], random))

    @staticmethod
    def _pause(victim: psutil.Process, seconds: float) -> None:
        victim.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGCONT)

    def faults(self) -> Mapping[str, Callable[[Random], None]]:
        """Everything that can be done to it on this machine, by name."""
        kinds = [
            self.kill_draft_worker,
            self.kill_target_rank,
            self.kill_coordinator,
            self.kill_ingress,
            self.kill_proxy,
            self.kill_node,
            self.hang_target_rank,
            self.hang_ingress,
            self.slow_drafter,
            self.cut_off_coordinator,
        ]
        if can_starve():
            kinds.append(self.starve_worker)
        if can_mount():
            kinds.append(self.fill_disk)
        if self._nodes is not None and self._nodes.network is not None:
            kinds += [self.cut_off_node, self.cut_off_drafts]
        return {kind.__name__: kind for kind in kinds}


class NoVictim(Exception):
    """Nobody of that kind is there just now."""


def _pick(victims: list[psutil.Process], random: Random) -> psutil.Process:
    if not victims:
        raise NoVictim
    return random.choice(sorted(victims, key=lambda process: process.pid))


def _end(victim: psutil.Process) -> None:
    """kill -9. It is gone afterwards: a look at it just then must not find everything whole."""
    victim.kill()
    _wait_until(victim, psutil.STATUS_ZOMBIE)


def _stop(victim: psutil.Process) -> None:
    victim.send_signal(signal.SIGSTOP)
    _wait_until(victim, psutil.STATUS_STOPPED)


def _wait_until(victim: psutil.Process, status: str) -> None:
    """Wait until that is what becomes of it, or it is not there any more."""
    until_s = time.monotonic() + _PROBE_TIMEOUT_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while victim.status() != status and time.monotonic() < until_s:
            time.sleep(0.01)


def _config(shape: Shape, family: Path, port: int) -> DrafthouseConfig:
    model = {"dtype": "float32", "device": "cpu", "num_threads": 1}
    eager = {"compile": {"mode": "off"}}  # it would be compiled anew after each fault, for seconds
    return DrafthouseConfig.model_validate(
        {
            "target": {
                "model": str(family / "target"),
                "tensor_parallel_size": shape.tensor_parallel_size,
                **model,
                **eager,
            },
            "speculative_config": {
                "method": "draft_model",
                "model": str(family / "draft"),
                "num_speculative_tokens": 3,
                "num_threads": 1,
                **eager,
            },
            "cache": {"memory_bytes": 64 << 20},
            "scheduler": {"max_num_seqs": 16},
            "cluster": {
                "namespace": "drafthouse-chaos",
                "target_groups": {
                    "num_groups": shape.num_target_groups,
                    "bundle": {"num_cpus": 0, "resources": {"target_slot": 1}},
                    "step_timeout_s": shape.step_timeout_s,
                },
                "draft_pool": {
                    "num_workers": shape.num_draft_workers,
                    "bundle": {"num_cpus": 0, "resources": {"draft_slot": 1}},
                },
                "membership": {"lease_s": shape.lease_s, "renew_s": shape.lease_s / 6},
                "health_checks": {"period_s": 1.0, "timeout_s": shape.health_timeout_s},
                "drain_timeout_s": 5,
            },
            "http": {
                "port": port,
                "num_replicas": shape.num_ingresses,
                "served_model_name": "chaos",
            },
        }
    )
