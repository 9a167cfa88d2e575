"""What is tried, for how long, and what that is expected to lose. When that may be is up to `Trials`."""

from __future__ import annotations

import math

import numpy as np

from specdec.scheduling.speculation.comparison import Comparison, num_probed
from specdec.scheduling.speculation.explanation import Reason
from specdec.scheduling.speculation.goodput import AheadOutlook, Evaluation, Ints, Option
from specdec.scheduling.speculation.settling import num_unsettled
from specdec.scheduling.speculation.trials import ABOUT_AS_GOOD, TrialLength, Trials

_PROBE_VERDICTS = 48
"""Proposals that a probe brings, if it may take that long."""
_FULL_PROBE_ROUNDS, _PIPELINED_PROBE_ROUNDS = 8, 10
"""Of probes of many requests that tell what rounds take, too; and of those of other modes, of which the first
ones do not."""
_FEWEST_AUDIT_ROUNDS, _MOST_AUDIT_ROUNDS = 2, 24
_CLOSE, _FEWEST_CLOSE_ROUNDS = 0.8, 4
"""Where plain decoding is thought to have this share of the goodput or more, audits take longer at least."""
_STRETCHES = 1.5, 3.0
"""How much longer the drafts of a stretch are, in turn: somewhat longer ones may be slower where much longer
ones are faster."""
_STRETCH_ROUNDS = TrialLength(2, 6)
"""At most as many as tell of longer drafts, whatever luck they have; two correct a cost that was wrong."""
_COMPARED_ROUNDS, _MOST_COMPARISON_ROUNDS = 7, 20
"""Enough for something to be known of a mode (`RoundEvidence.little_known`), for a while; and where rounds do
not count, since requests come and go."""
_CLOSELY_COMPARED_ROUNDS = 16
_FEWEST_CLOSELY_COMPARED, _MANY_SEQUENCES = 10, 32
"""The same for a mode that is nearly as good, or better: fewer would not tell. Of many sequences rounds are
longer, and vary less."""


def longer_drafts(
    trials: Trials, compared: Comparison, evaluation: Evaluation, outlook: AheadOutlook, num_positions: int
) -> Option | None:
    """Return what a stretch does, where there is one or might be; None: nothing.

    Longer drafts have to bring clearly more tokens: what they cost is in doubt, not what they bring.
    """
    kind = compared.kind
    if kind == "plain" or kind not in compared.options:
        return None
    if trials.current != "stretching" and not trials.is_due("stretching"):
        return None
    usual = compared.usual
    stretch = _STRETCHES[trials.num_ended("stretching") % len(_STRETCHES)]
    longest = math.ceil(stretch * int(usual.num_draft_tokens.max()))
    found = evaluation.option(kind, outlook, min(longest, num_positions))
    if found is None or found.tokens < usual.tokens * (1.0 + compared.margin):
        return None
    return found


def begin_trial(trials: Trials, compared: Comparison, num_sequences: int, longer: Option | None) -> None:
    """Begin a trial, if it is time for one: with longer drafts (if any), in another mode, without drafts, or
    with them.
    """
    usual, usual_rate = compared.usual, compared.usual_rate
    if longer is not None:
        factor = usual_rate / usual.rate
        trials.begin("stretching", _STRETCH_ROUNDS, _loss_s(longer.tokens, longer.rate * factor, usual_rate))
    other = compared.other_mode()
    if other is not None:
        num_before = num_unsettled(other.kind, usual.kind)
        loss_s = _loss_s(other.tokens, compared.rates[other.kind], usual_rate)
        length = TrialLength(_COMPARED_ROUNDS, _MOST_COMPARISON_ROUNDS, num_before)
        if compared.is_nearly_as_good(other):
            are_many = num_sequences >= _MANY_SEQUENCES
            fewest = _FEWEST_CLOSELY_COMPARED if are_many else _CLOSELY_COMPARED_ROUNDS
            length = TrialLength(fewest, 2 * fewest, num_before)
        trials.begin("comparing", length, loss_s, other.kind)
    # Lockstep with nothing but what requests ask for is what plain rounds are: there is nothing to leave out.
    has_drafts = usual is not compared.plain
    if has_drafts and not (compared.kind == "lockstep" and compared.is_as_asked):
        plain_rate = compared.rates["plain"]
        fewest = _FEWEST_CLOSE_ROUNDS if plain_rate >= _CLOSE * usual_rate else _FEWEST_AUDIT_ROUNDS
        is_close = plain_rate >= (1.0 - ABOUT_AS_GOOD) * usual_rate
        length = TrialLength(fewest, _MOST_AUDIT_ROUNDS, num_unsettled("plain", compared.kind), is_close)
        trials.begin("auditing", length, _loss_s(compared.plain.tokens, plain_rate, usual_rate))
    tried, asks_for_verdicts = compared.in_doubt
    if tried is not None:
        number = num_probed(num_sequences)
        fewest = 3 if tried.kind == "lockstep" else _PIPELINED_PROBE_ROUNDS
        if not asks_for_verdicts and number < num_sequences:
            fewest = max(fewest, _FULL_PROBE_ROUNDS)
        fewest = max(fewest, 6 // number)
        length = TrialLength(fewest, max(fewest, _PROBE_VERDICTS // number))
        # By the model alone: that rounds like these were slower is what is in doubt.
        trials.begin("probing", length, _loss_s(tried.tokens, tried.rate, usual_rate))


def tried_or_usual(trials: Trials, compared: Comparison, longer: Option | None) -> tuple[Option, Reason]:
    """Return what to do: what is usual, or what the trial that is on asks for.

    A trial that asks for what is not there any more ends.
    """
    trial = trials.current
    tried, _ = compared.in_doubt
    if trial == "probing" and tried is not None:
        return tried, trial
    if trial == "auditing" and compared.usual is not compared.plain:
        return compared.plain, trial
    if trial == "stretching" and longer is not None:
        return longer, trial
    other = None if trials.other_mode is None else compared.options.get(trials.other_mode)
    if trial == "comparing" and other is not None and other is not compared.usual:
        return other, trial
    trials.cancel()
    return compared.usual, compared.reason


def probed(chosen: Ints) -> Ints:
    """Draft for the youngest only: drafters have least to read of them. At least one token each. [N]"""
    is_probed = np.arange(len(chosen)) >= len(chosen) - num_probed(len(chosen))
    return np.where(is_probed, np.maximum(chosen, 1), 0)


def _loss_s(tokens: float, rate: float, usual_rate: float) -> float:
    """Return how much longer so many tokens take at a rate than at the usual one."""
    return tokens / rate - tokens / usual_rate
