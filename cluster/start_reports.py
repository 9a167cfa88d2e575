"""What workers that are starting do at the moment, on its way from them to whoever waits for the cluster."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from cluster.directory_actor import DIRECTORY_NAME
from specdec.transport.base import PeerId

_READ_TIMEOUT_S = 1.0


class StartReporter:
    """A `workers.progress.StartListener` that tells the directory; made by the owner, used by the worker.

    What is told helps people to wait; it is lost silently where there is no directory.
    """

    def __init__(self, namespace: str, worker: PeerId) -> None:
        self._namespace = namespace
        self._worker = worker

    def __call__(self, text: str) -> None:
        """Tell without waiting for an answer."""
        directory = _find_directory(self._namespace)
        if directory is not None:
            directory.report_start.remote(self._worker, text)


def read_start_reports(namespace: str) -> tuple[str, ...]:
    """Return what each starting worker does, such as "compiling target 37 %"; nothing while nobody knows."""
    directory = _find_directory(namespace)
    if directory is None:
        return ()
    try:
        reports: tuple[str, ...] = ray.get(directory.start_reports.remote(), timeout=_READ_TIMEOUT_S)
    except (RayActorError, GetTimeoutError):
        return ()
    return reports


def _find_directory(namespace: str) -> Any:
    try:
        return ray.get_actor(DIRECTORY_NAME, namespace=namespace)
    except ValueError:
        return None
