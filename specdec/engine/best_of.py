"""Of several choices for one prompt, the best ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.core.outputs import TokenLogprobs


def best_choices(choices: Sequence[Sequence[TokenLogprobs]], num_wanted: int) -> list[int]:
    """Return the indices of the choices with the highest mean log-probability per token, best first.

    One without tokens is behind all others; as such one that failed is to be given. Equal ones are ordered
    by index; with as many choices as are wanted, all are.
    """
    if num_wanted >= len(choices):
        return list(range(len(choices)))
    return sorted(range(len(choices)), key=lambda index: -_mean(choices[index]))[:num_wanted]


def _mean(tokens: Sequence[TokenLogprobs]) -> float:
    return sum(token.logprob for token in tokens) / len(tokens) if tokens else -math.inf
