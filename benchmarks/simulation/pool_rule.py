"""How many draft workers a target group needs: the rule for operators.

A group keeps one draft worker busy for a share of the time, its load L:

    L = (d D + P) / R      R = V + D                    lockstep
                           R = V                        draft_ahead, D with all continuations
                           R = max(2 V, V + D, 2 D)     ping_pong: d = 2 cohorts, V and D of half a batch

D is T_draft for the whole batch (k steps), P the time to read the prompts that come with a round (sequences x
tokens per round x prompt tokens per output token), V is T_verify with those prompts and the coordinator's own
time. d is 1 but in ping_pong. R is the round that is aimed at. Workers of a shared pool are to be given to a
group by its load:

    workers per group = L / X

X is found from simulated pools (`simulate.py`). L may be computed, as here, or measured where there are
workers to spare: `draft_compute_seconds` counts d D + P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulation.hardware import Hardware
from benchmarks.simulation.traffic import Trace
from benchmarks.simulation.verdicts import GUESS_RATES
from specdec.scheduling.speculation.guesses import hit_table
from specdec.scheduling.speculation.modes import OverlapMode

TOLERATED = 0.9
"""Goodput of a group whose pool is small enough, over that of one with workers to spare."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What one group does."""

    mode: OverlapMode
    num_draft_tokens: int
    num_sequences: int
    num_branches: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BareTimes:
    """Seconds of a round by the roofline."""

    verify_s: float
    draft_s: float
    reading_s: float
    round_s: float

    @property
    def load(self) -> float:
        """L."""
        return self.reading_s / self.round_s + self.draft_share

    @property
    def draft_share(self) -> float:
        """Share of the time that a worker of its own would draft."""
        return self.draft_s / self.round_s


def bare_times(hardware: Hardware, trace: Trace, situation: Situation) -> BareTimes:
    """Return the parts of L for a group that is always full."""
    k, mode = situation.num_draft_tokens, situation.mode
    cohorts = 2 if mode == "ping_pong" else 1
    number = situation.num_sequences / cohorts
    gain = _expected_gain(trace, k)
    drafted, branches = 1.0, 1.0
    if mode == "draft_ahead":
        drafted, branches = _share_of_hits(trace, k, situation.num_branches), float(situation.num_branches)
    num_prompts = number * (1.0 + drafted * gain) / trace.output.mean
    prompt_rows = num_prompts * trace.prompt.mean
    mean_context = trace.prompt.mean + trace.output.mean
    verify_s = (
        hardware.verify_s(number * (1.0 + drafted * k) + prompt_rows, number * mean_context)
        + hardware.round_overhead_s(round(number))
        + 2.0 * hardware.wire_s
    )
    taking_part = np.full(k, number * branches)
    draft_s = hardware.draft_s(taking_part, mean_context)
    waited_s = draft_s + 2.0 * hardware.wire_s
    reading_s = num_prompts * hardware.draft_s(np.zeros(0), 0.0, trace.prompt.mean)
    if mode == "lockstep":
        round_s = verify_s + waited_s
    elif mode == "draft_ahead":
        round_s = verify_s
    else:
        round_s = max(2.0 * verify_s, verify_s + waited_s, 2.0 * draft_s)
    return BareTimes(
        verify_s=verify_s, draft_s=cohorts * draft_s, reading_s=cohorts * reading_s, round_s=round_s
    )


def fewest_workers(goodput: Sequence[tuple[float, float]], tolerated: float = TOLERATED) -> float:
    """Return the workers per group from which on goodput is good enough, between those looked at.

    Args:
        goodput: (workers per group, goodput of a group), the first rising; the best of them is the measure.
        tolerated: share of the best that is enough.
    """
    enough = tolerated * max(value for _, value in goodput)
    above = next(at for at, (_, value) in enumerate(goodput) if value >= enough)
    if above == 0:
        return goodput[0][0]
    (fewer, worse), (more, better) = goodput[above - 1], goodput[above]
    share = (enough - worse) / (better - worse)
    return float(np.exp(np.log(fewer) + share * np.log(more / fewer)))


def fitted_x(loads: Sequence[float], workers: Sequence[float]) -> float:
    """Return the X with which L / X has the least median error."""
    ratios = np.asarray(loads) / np.asarray(workers)
    errors = [float(np.median(np.abs(np.log(ratios / x)))) for x in ratios]
    return float(ratios[int(np.argmin(errors))])


def _expected_gain(trace: Trace, k: int) -> float:
    """Return the draft tokens that stand of k, over requests whose acceptances differ (Beta moments)."""
    a, both = trace.acceptance * trace.concentration, trace.concentration
    powers = np.cumprod([(a + step) / (both + step) for step in range(k)])
    return float(powers.sum())


def _share_of_hits(trace: Trace, k: int, num_branches: int) -> float:
    """Return the share of rounds with drafts in draft_ahead, h_0 / (1 - h_k + h_0)."""
    table = hit_table(np.full(k + 1, trace.acceptance), GUESS_RATES, num_branches)[:, -1]
    return float(table[0] / (1.0 - table[k] + table[0]))
