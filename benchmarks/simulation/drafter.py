"""A draft worker: jobs of any coordinator that are there together are drafted together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.simulation.clock import EventQueue
from benchmarks.simulation.hardware import Floats, Hardware


@dataclass(slots=True, kw_only=True, eq=False)
class DraftJob:
    """What one coordinator asks of one worker."""

    taking_part: Floats
    """[K]: sequences (branches, ahead) that take part in each step; empty: only reading."""
    context_tokens: float
    """Tokens of context of those of the first step, together."""
    num_unseen: int
    """Tokens of prompts to be read before."""
    answer: Callable[[], None] | None
    """Called when it is done; None: nobody wants to know."""


class DraftWorker:
    """Serves whatever is there, as `DraftServer.step` does: first proposals, then long prompts."""

    def __init__(self, name: str, hardware: Hardware, events: EventQueue) -> None:
        self.name = name
        self._hardware = hardware
        self._events = events
        self._queue: list[DraftJob] = []
        self._serving: list[DraftJob] = []
        self._life = 0
        self.is_alive = True
        self.busy_s = 0.0
        self.num_batches = 0
        self.num_jobs = 0

    def submit(self, job: DraftJob) -> None:
        """Take a job in; lost where the worker is dead."""
        if not self.is_alive:
            return
        self.num_jobs += 1
        self._queue.append(job)
        if not self._serving:
            self._serve()

    def die(self) -> None:
        """Lose everything."""
        self.is_alive = False
        self._life += 1
        self._queue.clear()
        self._serving.clear()

    def revive(self) -> None:
        """Begin anew, empty."""
        self.is_alive = True

    def _serve(self) -> None:
        self._serving, self._queue = self._queue, []
        life = self._life
        done_s = self._events.now_s
        quick = [job for job in self._serving if job.num_unseen == 0]
        slow = [job for job in self._serving if job.num_unseen > 0]
        for jobs in (quick, slow):
            if jobs:
                done_s += self._proposals_s(jobs) + self._reading_s(jobs)
                self.num_batches += 1
                self._events.at(done_s, partial(self._answer, jobs, life))
        self.busy_s += done_s - self._events.now_s
        self._events.at(done_s, partial(self._go_on, life))

    def _reading_s(self, jobs: list[DraftJob]) -> float:
        num_unseen = sum(job.num_unseen for job in jobs)
        return self._hardware.draft_s(_NOBODY, 0.0, num_unseen) if num_unseen else 0.0

    def _proposals_s(self, jobs: list[DraftJob]) -> float:
        drafting = [job for job in jobs if len(job.taking_part)]
        if not drafting:
            return 0.0
        taking_part = np.zeros(max(len(job.taking_part) for job in drafting))
        for job in drafting:
            taking_part[: len(job.taking_part)] += job.taking_part
        context = sum(job.context_tokens for job in drafting)
        return self._hardware.draft_s(taking_part, context / max(float(taking_part[0]), 1e-9))

    def _answer(self, jobs: list[DraftJob], life: int) -> None:
        if life != self._life:
            return
        for job in jobs:
            if job.answer is not None:
                self._events.at(self._events.now_s + self._hardware.wire_s, job.answer)

    def _go_on(self, life: int) -> None:
        if life != self._life:
            return
        self._serving = []
        if self._queue:
            self._serve()


_NOBODY = np.zeros(0)
