"""What a worker process sets before a model is loaded in it: threads, logging, its end."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import ray

from specdec.core.control_groups import usable_cpus
from specdec.kv.host_memory import give_back_freed
from specdec.transport.base import PeerId
from workers.logs import make_formatter, mute_imports

if TYPE_CHECKING:
    from specdec.transport.device_lane import DeviceLanes
    from specdec.transport.torch_dist import TorchDistChannel
    from specdec.transport.zmq import ZmqOptions

logger = logging.getLogger(__name__)

_SPIN_COUNT = 20_000
"""Iterations that an idle OpenMP thread spins: some tens of microseconds, enough to bridge two operators of
one forward, too short to steal the cores from the other group, which runs next."""


def prepare_threads(num_threads: int | None) -> int:
    """Set the thread count and the spinning of OpenMP, which are read when torch is first loaded.

    Ray sets OMP_NUM_THREADS from an actor's CPUs; here the configuration decides, None meaning all cores
    of the process that its container's quota lets it use. Returns the number of threads.
    """
    if "torch" in sys.modules:
        logger.warning("torch is loaded already: OpenMP's spinning cannot be set any more in this process")
    count = num_threads or usable_cpus()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(count)
    os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_COUNT))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return count


def prepare_logging(name: str) -> None:
    """Send log lines of level INFO to standard error, from where Ray carries them to the driver.

    Raises:
        ConfigError: the environment asks for lines of a form that there is not.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(make_formatter(name))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for noisy in ("httpx", "transformers", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    mute_imports()


def require_own_gpus_used(device: str) -> None:
    """Refuse the CPU, which `device: auto` would be without a word, where Ray gave this actor GPUs.

    To be called when threads are prepared: it loads torch.

    Raises:
        ResourceError: PyTorch sees none of them.
    """
    from specdec.model.devices import require_gpus_used

    require_gpus_used(device, len(ray.get_gpu_ids()))


def give_way() -> None:
    """Do not interrupt who runs where this thread is woken; threads that it starts won't either.

    A message wakes a worker while its sender still has the next one to write. On machines with few cores
    the worker would take the sender's, and keep it for as long as the model runs: the other group, which
    waits for that next message, would stand still meanwhile. The share of the cores stays what it was.
    """
    with contextlib.suppress(OSError):  # a sandbox that forbids it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def settle_memory() -> None:
    """Take everything loaded so far out of the garbage collector's sight, and give back what was freed.

    torch and transformers make hundreds of thousands of long-lived objects; walking them in the middle of a
    round costs tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    give_back_freed()


def open_tensor_channel(
    peer_id: PeerId, host: str, options: ZmqOptions, lanes: DeviceLanes | None
) -> TorchDistChannel:
    """Open a worker's channel for tensors, given the name and the options of its channel for messages.

    A link of either is silent for too long after the same time.
    """
    # Only now, since OpenMP reads its settings when torch is loaded.
    from specdec.transport.gloo_link import TorchDistOptions
    from specdec.transport.torch_dist import TorchDistChannel

    return TorchDistChannel(
        PeerId(f"{peer_id}-tensors"),
        host=host,
        options=TorchDistOptions(
            heartbeat_interval_s=options.heartbeat_interval_s,
            heartbeat_timeout_s=options.heartbeat_timeout_s,
        ),
        lanes=lanes,
    )


class ServingThread:
    """Runs `serve_once` again and again, giving way to whoever sends it work.

    When it raises, the process ends, so that the owner notices.
    """

    def __init__(self, name: str, serve_once: Callable[[], object], close: Callable[[], None]) -> None:
        self._serve_once = serve_once
        self._close = close
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def stop(self, wake: Callable[[], None]) -> None:
        """End after the present call of `serve_once`; `wake` makes a waiting one return."""
        self._stopping = True
        wake()
        self._thread.join(timeout=30)

    def _run(self) -> None:
        give_way()
        try:
            while not self._stopping:
                self._serve_once()
            self._close()
        except BaseException:  # the border of the process: nobody else will hear of it
            logger.exception("the serving thread failed; this process ends")
            logging.shutdown()
            os._exit(1)
