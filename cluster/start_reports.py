"""What workers that are starting do at the moment, on its way from them to whoever waits for the cluster."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError

from cluster.directory_actor import find_directory
from specdec.transport.base import PeerId

_READ_TIMEOUT_S = 1.0


class StartReporter:
    """A `workers.progress.StartListener` that tells the directory; made by the owner, used by the worker.

    What is told helps people to wait; it is lost silently where there is no directory.
    """

    def __init__(self, namespace: str, worker: PeerId) -> None:
        self._namespace = namespace
        self._worker = worker
        self._directory: Any = None

    def __call__(self, text: str) -> None:
        """Tell without waiting for an answer.

        It is looked up once: each time that waits for Ray's head, who may be away while a model is loaded.
        """
        if self._directory is None:
            self._directory = find_directory(self._namespace)
        if self._directory is not None:
            self._directory.report_start.remote(self._worker, text)


def read_start_reports(namespace: str) -> tuple[str, ...]:
    """Return what each starting worker does, such as "compiling target 37 %"; nothing while nobody knows."""
    directory = find_directory(namespace)
    if directory is None:
        return ()
    try:
        reports: tuple[str, ...] = ray.get(directory.start_reports.remote(), timeout=_READ_TIMEOUT_S)
    except RayError:
        return ()
    return reports
