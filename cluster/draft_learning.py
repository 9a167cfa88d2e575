"""Carries texts from a draft worker to a trainer, and what that has learnt back.

The trainer is an actor of its own beside the draft worker, owned by the worker's owner: when the worker dies,
what has been heard and learnt is still there, and the next worker goes on with it; when the trainer dies, the
version that is served is not lost, only the texts are.

Nothing that goes wrong here takes the draft worker with it: learning pauses, longer each time, and the worker
drafts on with what it has.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from cluster.backoff import Backoff
from specdec.core.clock import Clock
from specdec.core.errors import TransportError
from specdec.transport.status import OnlineStatus
from workers.online_trainer import PackedVersion, TrainerReport

if TYPE_CHECKING:
    from cluster.worker_handle import WorkerHandle
    from specdec.engine.draft_pool.text_tap import LearnableText

logger = logging.getLogger(__name__)

_STAGING_S = 120.0
"""Longest time in which a worker prepares other weights, while it goes on drafting."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 300.0
_FORGIVEN_AFTER_S = 900.0
"""A trainer that has been at it for so long has not died of its start, nor of the first texts."""


class DraftLearning:
    """One draft worker's trainer. For one thread, which calls `exchange` again and again."""

    def __init__(
        self,
        start_trainer: Callable[[PackedVersion | None], Any],
        clock: Clock,
        *,
        patience_s: float,
    ) -> None:
        """`start_trainer` returns a handle of an `OnlineTrainerWorker` that goes on from a version.

        One that does not answer for `patience_s`, its start included, hangs, and another one is started.
        """
        self._start_trainer = start_trainer
        self._clock = clock
        self._patience_s = patience_s
        self._pauses = Backoff(
            first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S, forgiven_after_s=_FORGIVEN_AFTER_S
        )
        self._trainer: Any = None
        self._asked: Any = None
        self._asked_s = 0.0
        self._texts: Sequence[LearnableText] = ()
        """What the trainer has been sent, until it says that it has them."""
        self._served: PackedVersion | None = None
        self._given = 0
        """Number of the version that the present worker was given last."""
        self._may_give = True
        """Whether it has not failed to take one, for which learning pauses."""
        self._untold: Counter[str] = Counter()
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
        self._given, self._may_give = 0, True
        self._contained(self._give, worker)

    def exchange(self, worker: WorkerHandle) -> None:
        """Hand on what there is; wait for the worker alone, never for the trainer.

        While learning pauses that is the version which was served last, where a new worker has it not yet.

        Raises:
            TransportError: the worker is dead.
        """
        if self._is_over:
            return
        if self._pauses.is_due(self._clock.now_s()):
            self._contained(self._hand_on, worker)
        elif self._may_give:
            self._contained(self._give, worker)

    def stop(self) -> None:
        """End the trainer."""
        self._is_over, self._status = True, None
        self._let_go()

    def _contained(self, do: Callable[[WorkerHandle], None], worker: WorkerHandle) -> None:
        try:
            do(worker)
        except TransportError:
            raise
        except Exception:  # a border: drafts must not depend on what happens beside them
            self._untold["online_errors"] += 1
            logger.exception(
                "what there is to learn, or was learnt, could not be handed on; %s", self._pause()
            )

    def _hand_on(self, worker: WorkerHandle) -> None:
        if self._trainer is None:
            self._trainer = self._start_trainer(self._served)
        report = self._report()
        if report is not None:
            self._texts, self._status = (), report.status
            self._served = report.version or self._served
            self._untold.update(report.counts)
        if self._asked is None and self._trainer is not None:
            self._texts = (*self._texts, *worker.call("take_texts"))
            self._asked, self._asked_s = self._trainer.exchange.remote(self._texts), self._clock.now_s()
        if self._untold:
            worker.call("count", dict(self._untold))
            self._untold.clear()
        self._give(worker)

    def _give(self, worker: WorkerHandle) -> None:
        """Have the worker draft with the newest version, if it does not yet."""
        served = self._served
        if served is None or served.number == self._given:
            return
        # Asked first: until the worker's forward is compiled, which may take hours under load, all weights
        # would be sent for nothing again and again.
        self._may_give = False
        if not worker.call("can_use_version"):
            self._may_give = True
            return
        try:
            if worker.call("use_version", served, timeout_s=_STAGING_S):
                self._given = served.number
            self._may_give = True
        except RayTaskError as error:
            logger.error("the draft model learns no more: it takes no other weights: %s", error.cause)
            self.stop()

    def _report(self) -> TrainerReport | None:
        """Return what the trainer answers, if it has answered; have another one started where it is lost."""
        if self._asked is None:
            return None
        if not ray.wait([self._asked], timeout=0)[0]:
            if self._clock.now_s() - self._asked_s > self._patience_s:
                self._lose(f"it has not answered for {self._patience_s:g} s")
            return None
        asked, self._asked = self._asked, None
        try:
            report: TrainerReport = ray.get(asked)
        except RayError as error:
            self._lose(str(error))
            return None
        return report

    def _lose(self, why: str) -> None:
        """Give the trainer up, and what it was sent: it may have died of that."""
        self._untold["online_trainers_lost"] += 1
        self._untold["online_texts_dropped"] += len(self._texts)
        self._texts = ()
        self._let_go()
        logger.warning("the trainer of the draft model is lost; %s: %s", self._pause(), why)

    def _pause(self) -> str:
        """Let learning rest; return how long, in words."""
        return f"learning goes on in {self._pauses.failed(self._clock.now_s()):g} s"

    def _let_go(self) -> None:
        trainer, self._trainer, self._asked = self._trainer, None, None
        if trainer is not None:
            ray.kill(trainer, no_restart=True)
