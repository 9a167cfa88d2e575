"""A Ray cluster on this machine for as long as a command runs, or a connection to one that runs already.

Ray reads its environment when it is imported and hands it to every process it starts, so this module sets
it first and imports Ray afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from deploy.proxies import proxy_environment
from deploy.ray_guard import RayGuard, is_alive
from specdec.core.errors import DrafthouseError, ResourceError

_ENVIRONMENT = {
    # Workers would run at nice 15 and lose every race for a core.
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # Else any late call of a thread of Serve's would start a second cluster, once we are disconnected.
    "RAY_ENABLE_AUTO_CONNECT": "0",
}
_SERVE_ENVIRONMENT = {
    # Who hangs will not drain: the time that it is given would pass before its place is free again.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}
_LOCAL_ENVIRONMENT = {
    # Ray's own default for a cluster like this one, said aloud so that no warning is needed.
    "RAY_AUTH_MODE": "token",
    # When memory is short, Ray's monitor would kill all of our processes again and again, whoever fills the
    # memory; they hardly have any to give back. The kernel ends the one process that is too big.
    "RAY_memory_monitor_refresh_ms": "0",
}
_OBJECT_STORE_BYTES = 128 << 20
"""Tokens travel on channels and weights are read from disk: the object store holds next to nothing."""
_MARK = "DRAFTHOUSE_LOCAL_RAY"
"""In the environment of all processes of a cluster of our own."""
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 5.0
_POLL_S = 0.02
logger = logging.getLogger(__name__)


class RayNotStarted(DrafthouseError):
    """The local cluster did not come up: too little memory, disk or time."""


class RaySession:
    """Between `open` and `close` Ray is connected; afterwards no process that it started is left."""

    def __init__(
        self,
        *,
        address: str | None,
        num_cpus: int | None,
        show_logs: bool,
        on_loss: Callable[[str], None] | None = None,
        proxy: Mapping[str, str] | None = None,
    ) -> None:
        """`address` None starts a cluster of `num_cpus` CPUs (None: all that this process may use).
        `proxy` is what its processes are to know of Serve's proxies (None: the Python one).

        `on_loss` is called in a thread of its own when such a cluster has died; its processes have been ended
        then. It has to end this one, which cannot be relied on to leave Ray's calls.
        """
        self._guard = RayGuard(self._bury) if on_loss is not None and address is None else None
        self._on_loss = on_loss
        self._address = address
        self._num_cpus = num_cpus
        self._show_logs = show_logs
        self._proxy = proxy_environment("python") if proxy is None else proxy
        self._mark = secrets.token_hex(16)

    @property
    def is_local(self) -> bool:
        """Whether the cluster is this session's own."""
        return self._address is None

    @property
    def serve_environment(self) -> Mapping[str, str]:
        """What Serve's processes have to find in their environment, once this is open.

        Those of a cluster of our own do; whoever has started another one may not have known of it.
        """
        return {name: os.environ[name] for name in (*_SERVE_ENVIRONMENT, *self._proxy)}

    @property
    def num_gpus(self) -> float:
        """GPUs that the cluster has to give, once this is open."""
        import ray

        return float(ray.cluster_resources().get("GPU", 0.0))

    def open(self) -> None:
        """Connect, starting a cluster if none is named.

        Raises:
            ResourceError: there is no cluster at the address.
            RayNotStarted: a cluster of our own did not come up.
        """
        environment = {
            **_ENVIRONMENT,
            **_SERVE_ENVIRONMENT,
            **self._proxy,
            **(_LOCAL_ENVIRONMENT if self.is_local else {}),
        }
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        if self.is_local:
            os.environ[_MARK] = self._mark
            if not _has_place_for_token():
                os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        self._connect()
        if self._guard is not None:
            self._guard.start()

    def close(self) -> None:
        """Disconnect; end the cluster if it is this session's own. Idempotent."""
        import ray

        if self._guard is not None:
            self._guard.stop()
        logging.getLogger("asyncio").addFilter(_is_not_of_late_polls)
        processes = self._own_processes()
        ray.shutdown()
        # HAProxy is started anew at every change of the doors, the last time while they go.
        _end([*{*processes, *self._own_processes()}])

    def _connect(self) -> None:
        import ray

        level = logging.INFO if self._show_logs else logging.ERROR
        if self._address is not None:
            try:
                ray.init(self._address, log_to_driver=self._show_logs, logging_level=level)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ResourceError(f"--address: no Ray cluster at {self._address}: {error}") from error
            return
        try:
            with _deaf_children():
                ray.init(
                    num_cpus=self._num_cpus,
                    include_dashboard=False,
                    log_to_driver=self._show_logs,
                    logging_level=level,
                    object_store_memory=_OBJECT_STORE_BYTES,
                )
        except Exception as error:  # Ray raises nothing more precise, on a machine that is too slow for it
            raise RayNotStarted(f"Ray did not start: {error}") from error

    def _bury(self, died: str, family: Sequence[psutil.Process]) -> None:
        assert self._on_loss is not None
        for process in {*family, *self._own_processes()}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._on_loss(f"{died} of the local Ray cluster has died, and all that ran on it with it")

    def _own_processes(self) -> list[psutil.Process]:
        """Everything below this process now, and what has lost its parents meanwhile.

        Workers are children of Ray's own processes. What a worker has started, as Serve does HAProxy, may
        outlive it; then only the environment tells whose it is.
        """
        if not self.is_local:
            return []
        own = psutil.Process()
        return [*{*own.children(recursive=True), *_marked(self._mark)} - {own}]


def _is_not_of_late_polls(record: logging.LogRecord) -> bool:
    """Serve's handles poll in a thread that nobody can end; that they find no Ray any more is no news."""
    return "LongPollClient" not in record.getMessage()


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # of others, or it has just ended
            if process.environ().get(_MARK) == mark:
                yield process


@contextlib.contextmanager
def _deaf_children() -> Iterator[None]:
    """Block the signals that end us in every process started meanwhile; Ray does so for SIGINT alone.

    `timeout` and systemd send SIGTERM to all processes of a group at once. Ray's own would end before the
    requests that they serve; it is for this process to hear of the end, and to end the others after them.
    A signal that arrives meanwhile is delivered afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _has_place_for_token() -> bool:
    """Whether Ray finds its authentication token, or can write a new one to the home folder."""
    if "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ:
        return True
    folder = Path("~/.ray").expanduser()
    if (folder / "auth_token").is_file():
        return True
    try:
        folder.mkdir(exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _end(processes: Sequence[psutil.Process]) -> None:
    """Wait for processes to end by themselves, then end them."""
    alive = _still_alive(processes, _GRACE_S)
    for process in alive:
        logger.debug("killing %s, which outlived Ray", process)
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    _still_alive(alive, _GRACE_S)


def _still_alive(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Return those that have not ended after a while.

    Orphans that nobody reaps, as in a container whose first process does not care, have ended: psutil's own
    wait would take them for alive.
    """
    until_s = time.monotonic() + timeout_s
    while (alive := [process for process in processes if is_alive(process)]) and time.monotonic() < until_s:
        time.sleep(_POLL_S)
    return alive


def session_log_folder() -> str:
    """Return where the logs of the connected cluster's processes are."""
    from ray._private.worker import global_worker  # Ray has no public form of this

    node = global_worker.node
    return str(node.get_logs_dir_path()) if node is not None else "the Ray nodes' log folders"
