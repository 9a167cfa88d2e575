"""Starts the other ranks of a model on this machine, for engines without a cluster."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import torch

from specdec.core.errors import ResourceError
from specdec.engine.config import EngineConfig
from specdec.engine.ranks.follower import FollowerPlace, Role
from specdec.model.parallel.group import RankGroup, RankSpec, serve_store
from specdec.model.parallel.heartbeat import HeartbeatWatch

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_FAREWELL_S = 10.0


class FollowerProcesses:
    """Implements `leader.Followers`: processes that this one has started."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watch: HeartbeatWatch | None = None

    def start(self, place: FollowerPlace, num_threads: int) -> None:
        """Start one rank."""
        process = subprocess.Popen(
            [sys.executable, "-m", "specdec.engine.ranks.follower"],
            stdin=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"},
        )
        self._processes.append(process)
        assert process.stdin is not None
        with process.stdin as stream:
            stream.write(msgspec.json.encode(place))

    def watch(self, group: RankGroup) -> None:
        """From now on, end a rank that does not run any more: then its peers notice."""
        self._watch = HeartbeatWatch(group, self._end)

    def close(self) -> None:
        """Wait a while for their end, then kill them."""
        self._watch_no_more()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_FAREWELL_S)
            if process.poll() is None:
                logger.warning("killed rank process %d, which did not end", process.pid)
                self.kill()

    def kill(self) -> None:
        """End them now."""
        self._watch_no_more()
        for process in self._processes:
            process.kill()
            process.wait()

    def _end(self, rank: int) -> None:
        logger.error("killed rank process %d, which does not run any more", self._processes[rank - 1].pid)
        self._processes[rank - 1].kill()

    def _watch_no_more(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None


@contextmanager
def leading(
    role: Role, config: EngineConfig, size: int, device: str, ranks: RankGroup | None
) -> Iterator[tuple[RankGroup, FollowerProcesses | None]]:
    """Give `ranks`, or a group that is launched here and ended again when the body fails.

    Raises:
        ResourceError, TransportError: as `launch`.
    """
    if ranks is not None:
        yield ranks, None
        return
    group, followers = launch(role, config, size, device)
    try:
        yield group, followers
    except BaseException:
        followers.kill()
        raise


def launch(role: Role, config: EngineConfig, size: int, device: str) -> tuple[RankGroup, FollowerProcesses]:
    """Start ranks 1 .. size - 1 of a model and return rank 0's place among them.

    Args:
        role: which model of `config`.
        config: whole configuration.
        size: ranks, this process included.
        device: as in `ModelConfig.device`; on GPUs rank r takes the r-th.

    Raises:
        ResourceError: there are fewer GPUs than ranks.
        TransportError: a rank did not come up.
    """
    devices = rank_devices(device, size)
    num_threads = max(1, torch.get_num_threads() // size) if devices[0].type == "cpu" else 1
    config_json = config.model_dump_json(exclude_unset=True)  # some defaults may not be written out
    store = serve_store(_HOST)
    followers = FollowerProcesses()
    specs = [
        RankSpec(rank=rank, size=size, store_host=_HOST, store_port=store.port, own_host=_HOST)
        for rank in range(size)
    ]
    try:
        for spec, place_device in zip(specs[1:], devices[1:], strict=True):
            place = FollowerPlace(role, spec, str(place_device), config_json)
            followers.start(place, num_threads)
        group = RankGroup.join(specs[0], devices[0], store)
        followers.watch(group)
    except BaseException:
        followers.kill()
        raise
    if devices[0].type == "cpu":
        torch.set_num_threads(num_threads)
    return group, followers


def rank_devices(name: str, size: int) -> list[torch.device]:
    """Return the device of each of `size` ranks on one machine.

    Raises:
        ResourceError: there are fewer GPUs than ranks, or one named GPU for several ranks.
    """
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else torch.device(name).type
    if kind == "cpu":
        return [torch.device("cpu")] * size
    if name not in {"auto", kind}:
        raise ResourceError(f"device {name} is one GPU: {size} ranks need one each; write device: {kind}")
    available = torch.cuda.device_count()
    if size == 1 and available == 0:
        raise ResourceError(f"device {name} needs a GPU, and this process sees none")
    if available < size:
        raise ResourceError(f"{size} ranks need {size} GPUs, here are {available}")
    return [torch.device(kind, rank) for rank in range(size)]
