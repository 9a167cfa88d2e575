"""Drafting on the target's own GPUs: nothing is between the two, and one waits while the other works.

The draft model is held by as many of a group's GPUs as draft fastest. It reads and drafts when a round asks
for it, as `DraftModelProposer` does in the process of its engine: prompts while the target reads them, and
what was committed while nothing was drafted for a request once it is drafted for again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.hardware import Hardware
from benchmarks.simulation.traffic import SimulatedRequest
from benchmarks.simulation.verdicts import Ints
from specdec.core.ids import RequestId


class OwnDrafts(NamedTuple):
    """What drafting for one round comes to."""

    seconds: float
    is_drafted: NDArray[np.bool_]
    """[n]: whose proposals are there."""
    num_behind: int
    """Committed tokens that were yet to be read, beyond what a round brings (`RoundObservation`)."""


class _Reading(NamedTuple):
    """What the draft model has yet to read of a request."""

    request: SimulatedRequest
    budget: int
    num_missing: int
    place: int
    """Among the sequences that decode; -1: its prompt is being read."""


class OwnDrafter:
    """The draft model of one group."""

    def __init__(self, hardware: Hardware, max_read_tokens: int) -> None:
        """Draft by the costs of `hardware.draft`; read no more than `max_read_tokens` for a round."""
        self._hardware = hardware
        self._max_read_tokens = max_read_tokens
        self._num_read: dict[RequestId, int] = {}
        """Leading tokens that were read, or drafted behind those."""

    @property
    def known(self) -> frozenset[RequestId]:
        """Requests that something was read of."""
        return frozenset(self._num_read)

    def assume_read(self, request: SimulatedRequest) -> None:
        """Know a request from long ago."""
        self._num_read[request.request_id] = request.committed_len

    def release(self, request_id: RequestId) -> None:
        """Forget a request."""
        self._num_read.pop(request_id, None)

    def propose(
        self, decoding: Sequence[SimulatedRequest], budgets: Ints, prompts: Sequence[SimulatedRequest]
    ) -> OwnDrafts:
        """Read, and draft for those who have nothing left to read.

        Args:
            decoding: n sequences that decode.
            budgets: [n], draft tokens of each.
            prompts: requests whose prompts the target reads in this round.
        """
        readings = [
            self._reading(one, budget, place)
            for place, (one, budget) in enumerate(zip(decoding, budgets.tolist(), strict=True))
            if budget > 0
        ]
        num_behind = sum(one.num_missing - 1 for one in readings)
        readings += [self._reading(one, 0, -1) for one in prompts]
        num_left = self._max_read_tokens
        if sum(one.num_missing for one in readings) > num_left:
            readings.sort(key=lambda one: one.num_missing)
        is_drafted = np.zeros(len(decoding), dtype=np.bool_)
        num_beside = 0
        for request, budget, num_missing, place in readings:
            num_tokens = min(num_missing, num_left)
            num_left -= num_tokens
            is_up_to_date = num_tokens == num_missing
            has_drafts = budget > 0 and is_up_to_date
            if has_drafts:
                is_drafted[place] = True
            num_beside += num_tokens - has_drafts  # its last token is what a draft begins with
            first_unread = request.committed_len - (place < 0) - num_missing
            self._num_read[request.request_id] = first_unread + num_tokens + (budget if has_drafts else 0)
        contexts = [one.committed_len for one, is_there in zip(decoding, is_drafted, strict=True) if is_there]
        seconds = self._seconds(budgets[is_drafted], contexts, num_beside)
        return OwnDrafts(seconds, is_drafted, num_behind)

    def _reading(self, request: SimulatedRequest, budget: int, place: int) -> _Reading:
        """The last token of a request is read when there is something to draft behind it, and then always."""
        num_read = self._num_read.get(request.request_id, 0)
        if budget > 0:
            return _Reading(request, budget, max(1, request.committed_len - num_read), place)
        return _Reading(request, 0, max(0, request.committed_len - 1 - num_read), place)

    def _seconds(self, lengths: Ints, contexts: Sequence[int], num_beside: int) -> float:
        if not len(lengths):
            return self._hardware.draft_s(np.zeros(0), 0.0, num_beside)
        steps = np.arange(int(lengths.max()))
        taking_part = (lengths[:, None] > steps).sum(0).astype(np.float64)
        return self._hardware.draft_s(taking_part, float(np.mean(contexts)), num_beside=num_beside)


def with_fastest_draft(hardware: Hardware, num_sequences: int, mean_context: float) -> Hardware:
    """Return the same with the draft model on as many of the target's GPUs as draft fastest.

    More of them read its weights and its cache sooner, and add up their parts twice a layer.
    """
    steps = np.full(1, float(num_sequences))
    widths = [width for width in (1, 2, 4, 8, 16) if width <= hardware.target.num_gpus]
    placed = [replace(hardware, draft=replace(hardware.draft, num_gpus=width)) for width in widths]
    return min(placed, key=lambda one: one.draft_s(steps, mean_context))
