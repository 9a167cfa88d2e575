"""The readable oracle: speculative decoding over explicit distributions, as the papers write it.

Nothing here is fast or used in serving. Models are functions from a prefix to a row of probabilities;
p is the target and q the draft. Tests compare the engine's rules with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Distribution = Sequence[float]
Model = Callable[[tuple[int, ...]], Distribution]
TokenFunction = Callable[[tuple[int, ...]], int]


def decode(target: Model, prefix: tuple[int, ...], num_tokens: int, rng: random.Random) -> tuple[int, ...]:
    """Decode without speculation: what all other functions must be distributed as."""
    for _ in range(num_tokens):
        prefix = (*prefix, draw(target(prefix), rng))
    return prefix


def rejection_round(
    target: Model, draft: Model, prefix: tuple[int, ...], num_drafted: int, rng: random.Random
) -> tuple[int, ...]:
    """Decode 1 to num_drafted + 1 tokens by rejection sampling (Leviathan et al. 2023, algorithm 1)."""
    drafted = prefix
    for _ in range(num_drafted):
        drafted = (*drafted, draw(draft(drafted), rng))
    for length in range(len(prefix), len(drafted)):
        p, q, token = target(drafted[:length]), draft(drafted[:length]), drafted[length]
        if rng.random() >= p[token] / q[token]:
            excess = [max(0.0, p_v - q_v) for p_v, q_v in zip(p, q, strict=True)]
            return (*drafted[:length], draw(excess if sum(excess) > 0.0 else p, rng))
    return (*drafted, draw(target(drafted), rng))


def matching_round(
    token_function: TokenFunction, draft: TokenFunction, prefix: tuple[int, ...], num_drafted: int
) -> tuple[int, ...]:
    """Decode 1 to num_drafted + 1 tokens by sample-and-match: never anything but the token function's."""
    drafted = prefix
    for _ in range(num_drafted):
        drafted = (*drafted, draft(drafted))
    for length in range(len(prefix), len(drafted)):
        wanted = token_function(drafted[:length])
        if drafted[length] != wanted:
            return (*drafted[:length], wanted)
    return (*drafted, token_function(drafted))


def draw(weights: Distribution, rng: random.Random) -> int:
    """Draw an index in proportion to the weights."""
    return rng.choices(range(len(weights)), weights)[0]
