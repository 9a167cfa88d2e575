"""Kinds of rounds beside one another, with rates that the test makes up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specdec.scheduling.speculation.comparison import Comparison
from specdec.scheduling.speculation.goodput import Kind, Option


def compared(kind: Kind, expected: dict[Kind, float], measured: dict[Kind, float]) -> Comparison:
    options = {
        one: Option(one, np.array([0 if one == "plain" else 4]), rate, 1.0, 0.1, 0.9)
        for one, rate in expected.items()
    }
    return Comparison(options=options, rates={**expected, **measured}, kind=kind, margin=0.02)


def asking(compared: Comparison, *asked: int) -> Comparison:
    """The same where requests ask for so many draft tokens, and other options draft 4 for everyone."""
    options = {
        kind: option._replace(num_draft_tokens=np.array(asked if kind == "plain" else [4] * len(asked)))
        for kind, option in compared.options.items()
    }
    return replace(compared, options=options)
