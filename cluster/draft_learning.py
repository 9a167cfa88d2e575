"""Carries texts from a draft worker to a trainer, and what that has learnt back.

The trainer is an actor of its own beside the draft worker, owned by the worker's owner: when the worker dies,
what has been heard and learnt is still there, and the next worker goes on with it; when the trainer dies, the
version that is served is not lost, only the texts are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from specdec.transport.status import OnlineStatus
from workers.online_trainer import PackedVersion, TrainerReport

if TYPE_CHECKING:
    from cluster.worker_handle import WorkerHandle
    from specdec.engine.text_tap import LearnableText

logger = logging.getLogger(__name__)


class DraftLearning:
    """One draft worker's trainer. For one thread, which calls `exchange` again and again."""

    def __init__(self, start_trainer: Callable[[PackedVersion | None], Any]) -> None:
        """`start_trainer` returns a handle of an `OnlineTrainerWorker` that goes on from a version."""
        self._start_trainer = start_trainer
        self._trainer: Any = None
        self._asked: Any = None
        self._texts: Sequence[LearnableText] = ()
        """What the trainer has been sent, until it says that it has them."""
        self._served: PackedVersion | None = None
        self._given = 0
        """Number of the version that the present worker was given last."""
        self._untold: dict[str, int] = {}
        self._status: OnlineStatus | None = None
        self._is_over = False

    @property
    def status(self) -> OnlineStatus | None:
        """What has been learnt, as the trainer said last; None: nothing can be, or it has not begun."""
        return self._status

    def begin(self, worker: WorkerHandle) -> None:
        """A worker is ready that drafts with the weights that the draft model came with.

        Raises:
            TransportError: it is dead.
        """
        self._given = 0
        self._give(worker)

    def exchange(self, worker: WorkerHandle) -> None:
        """Hand on what there is; wait for the worker alone, never for the trainer.

        Raises:
            TransportError: the worker is dead.
        """
        if self._is_over:
            return
        if self._trainer is None:
            self._trainer = self._start_trainer(self._served)
        report = self._report()
        if report is not None:
            self._texts, self._status = (), report.status
            self._served = report.version or self._served
            for name, count in report.counts.items():
                self._untold[name] = self._untold.get(name, 0) + count
        if self._asked is None and self._trainer is not None:
            self._texts = (*self._texts, *worker.call("take_texts"))
            self._asked = self._trainer.exchange.remote(self._texts)
        if self._untold:
            worker.call("count", self._untold)
            self._untold = {}
        self._give(worker)

    def stop(self) -> None:
        """End the trainer."""
        self._is_over, self._status = True, None
        self._let_go()

    def _give(self, worker: WorkerHandle) -> None:
        """Have the worker draft with the newest version, if it does not yet."""
        served = self._served
        if served is None or served.number == self._given:
            return
        try:
            if worker.call("use_version", served, timeout_s=_STAGING_S):
                self._given = served.number
        except RayTaskError as error:
            logger.error("the draft model learns no more: it takes no other weights: %s", error.cause)
            self.stop()

    def _report(self) -> TrainerReport | None:
        """Return what the trainer answers, if it has answered; have another one started where it is dead."""
        if self._asked is None or not ray.wait([self._asked], timeout=0)[0]:
            return None
        asked, self._asked = self._asked, None
        try:
            report: TrainerReport = ray.get(asked)
        except (RayActorError, RayTaskError) as error:
            logger.warning("the trainer of the draft model is gone, another one is started: %s", error)
            self._untold["online_trainers_lost"] = self._untold.get("online_trainers_lost", 0) + 1
            self._let_go()
            return None
        return report

    def _let_go(self) -> None:
        if self._trainer is not None:
            ray.kill(self._trainer, no_restart=True)
        self._trainer = self._asked = None


_STAGING_S = 120.0
"""Longest time in which a worker prepares other weights, while it goes on drafting."""
