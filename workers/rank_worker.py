"""The Ray actors of ranks 1, 2, ... of a model that several processes hold, and how rank 0 starts them.

Rank 0 is the target or draft worker itself. It owns the actors of the other ranks, so that Ray ends them with
it; and it ends itself when one of them dies, so that its owner replaces the whole group.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray

from specdec.core.control_groups import usable_cpus
from specdec.core.errors import UserError
from specdec.engine.config import EngineConfig
from workers.process import give_way, prepare_logging, prepare_threads, require_own_gpus_used

if TYPE_CHECKING:
    from specdec.engine.ranks.follower import Role
    from specdec.model.parallel.group import RankGroup, RankSpec

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"


class RankWorkerProcess:
    """One rank but the first. It loads and serves in a thread, which its constructor does not wait for."""

    def __init__(
        self, role: Role, config: EngineConfig, rank: int, size: int, store: tuple[str, int]
    ) -> None:
        prepare_logging(f"{role}-rank-{rank}")
        prepare_threads(threads_per_rank(_threads(role, config), size))
        require_own_gpus_used(_device_name(role, config))
        self._thread = threading.Thread(
            target=self._run, args=(role, config, rank, size, store), name="rank", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when rank 0 has said stop, or the model could not be loaded."""
        self._thread.join()

    def _run(self, role: Role, config: EngineConfig, rank: int, size: int, store: tuple[str, int]) -> None:
        give_way()
        try:
            from specdec.engine.ranks.follower import follow
            from specdec.model.parallel.group import RankGroup

            spec = _spec(rank, size, store, own_host(store[0]))
            follow(role, config, RankGroup.join(spec, _device(role, config)))
        except UserError as error:
            # Rank 0 raises it too and tells its owner; ending here could end rank 0 before it has.
            logger.error("rank %d of the %s: %s", rank, role, error)
        except BaseException:  # the border of the process: rank 0 notices its end
            logger.exception("rank %d of the %s failed; this process ends", rank, role)
            logging.shutdown()
            os._exit(1)


RankWorker = ray.remote(RankWorkerProcess)
"""The actor class; rank 0 gives it resources and a bundle."""


def lead_ranks(
    role: Role,
    config: EngineConfig,
    host: str,
    others: Sequence[Mapping[str, Any]],
    silence_s: float,
) -> RankGroup | None:
    """Start the other ranks of a model and return rank 0's place among them; None when there are none.

    This process ends when one of them does, or does not run any more.

    Args:
        role: which model of `config`.
        config: whole configuration.
        host: address of this process.
        others: actor options of ranks 1, 2, ...
        silence_s: for how long a rank may not run.

    Raises:
        TransportError: a rank did not come up.
    """
    if not others:
        return None
    from specdec.model.parallel.group import RankGroup, serve_store
    from specdec.model.parallel.heartbeat import HeartbeatWatch, looks_in

    size = 1 + len(others)
    store = serve_store(host)
    actors = [
        RankWorker.options(**options).remote(role, config, rank, size, (host, store.port))
        for rank, options in enumerate(others, 1)
    ]
    watch = threading.Thread(target=_end_with, args=(actors,), name="rank-watch", daemon=True)
    watch.start()
    group = RankGroup.join(_spec(0, size, (host, store.port), host), _device(role, config), store)
    HeartbeatWatch(group, _end_without, max_silent_looks=looks_in(silence_s))
    return group


def _end_with(actors: Sequence[Any]) -> None:
    """End this process when one of the other ranks has ended; keeps them alive until then."""
    ended, _ = ray.wait([actor.wait.remote() for actor in actors], num_returns=1)
    try:
        ray.get(ended)
    except ray.exceptions.RayError as error:  # whichever: of its memory monitor's victims Ray says another
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        logger.error("a rank has died, so this process ends too: %s", what)
        logging.shutdown()
        os._exit(1)


def _end_without(rank: int) -> None:
    """End this process because a rank does not run any more: Ray ends the other ranks with their owner."""
    logger.error("rank %d does not run any more, so this process ends", rank)
    logging.shutdown()
    os._exit(1)


def threads_per_rank(num_threads: int | None, size: int) -> int | None:
    """Return the threads of one rank: as configured, else an equal share of this process's cores."""
    if num_threads is not None or size == 1:
        return num_threads
    return max(1, usable_cpus() // size)


def own_host(store_host: str) -> str:
    """Address of this process, on the kind of network that the store is on."""
    return LOOPBACK if store_host == LOOPBACK else str(ray.util.get_node_ip_address())


def _threads(role: Role, config: EngineConfig) -> int | None:
    return config.target.num_threads if role == "target" else config.speculative_config.num_threads


def _spec(rank: int, size: int, store: tuple[str, int], host: str) -> RankSpec:
    from specdec.model.parallel.group import RankSpec

    return RankSpec(rank=rank, size=size, store_host=store[0], store_port=store[1], own_host=host)


def _device(role: Role, config: EngineConfig) -> Any:
    """Ray shows each actor the GPUs of its bundle only: the first is this rank's."""
    from specdec.engine.ranks.launch import rank_devices

    return rank_devices(_device_name(role, config), 1)[0]


def _device_name(role: Role, config: EngineConfig) -> str:
    return config.target.device if role == "target" else config.speculative_config.device
