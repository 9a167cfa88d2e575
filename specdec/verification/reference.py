"""The readable oracle: speculative decoding over explicit distributions, as the papers write it.

Nothing here is fast or used in serving. Models are functions from a prefix to a row of probabilities;
p is the target and q the draft. Tests compare the engine's rules with it.
"""

from __future__ import annotations

import math
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
            excess = _excess(p, q)
            return (*drafted[:length], draw(excess if sum(excess) > 0.0 else p, rng))
    return (*drafted, draw(target(drafted), rng))


def block_round(
    target: Model, draft: Model, prefix: tuple[int, ...], num_drafted: int, rng: random.Random
) -> tuple[int, ...]:
    """Decode 1 to num_drafted + 1 tokens by block verification (Sun et al. 2024, algorithm 2)."""
    drafted = prefix
    for _ in range(num_drafted):
        drafted = (*drafted, draw(draft(drafted), rng))
    weight = kept_weight = 1.0
    kept = prefix
    for length in range(len(prefix) + 1, len(drafted) + 1):
        before, token = drafted[: length - 1], drafted[length - 1]
        weight = min(1.0, weight * target(before)[token] / draft(before)[token])
        chance = weight
        if length < len(drafted):
            total = sum(_excess(target(drafted[:length]), draft(drafted[:length]), weight))
            chance = 1.0 if total + 1.0 - weight <= 0.0 else total / (total + 1.0 - weight)
        if rng.random() < chance:
            kept, kept_weight = drafted[:length], weight
    if kept == drafted:
        return (*kept, draw(target(kept), rng))
    excess = _excess(target(kept), draft(kept), kept_weight)
    return (*kept, draw(excess if sum(excess) > 0.0 else target(kept), rng))


def multi_round(
    target: Model,
    draft: Model,
    prefix: tuple[int, ...],
    widths: Sequence[int],
    rng: random.Random,
    *,
    replaced: bool = False,
) -> tuple[int, ...]:
    """Decode 1 to len(widths) + 1 tokens over a tree whose nodes of depth i have widths[i] children.

    Children are drawn without replacement (Chen et al., "Sequoia", 2024, algorithm 2), or independently if
    `replaced` (Miao et al., "SpecInfer", 2023, algorithm 2). Those of nodes not reached do not matter and are
    not drawn.
    """
    for width in widths:
        p, q = list(target(prefix)), list(draft(prefix))
        for _ in range(width):
            token = draw(q, rng)
            if rng.random() < p[token] / q[token]:
                prefix = (*prefix, token)
                break
            excess = _excess(p, q)
            p = _normalised(excess if sum(excess) > 0.0 else p)
            if not replaced:
                q[token] = 0.0
                q = _normalised(q)
        else:
            return (*prefix, draw(p, rng))
    return (*prefix, draw(target(prefix), rng))


def typical_round(
    target: Model, drafted: Sequence[int], prefix: tuple[int, ...], epsilon: float, delta: float
) -> tuple[int, ...]:
    """Decode 1 to len(drafted) + 1 tokens by typical acceptance (Cai et al., "Medusa", 2024); lossy."""
    for token in drafted:
        p = target(prefix)
        entropy = -sum(p_v * math.log(p_v) for p_v in p if p_v > 0.0)
        if p[token] <= min(epsilon, delta * math.exp(-entropy)):
            break
        prefix = (*prefix, token)
    p = target(prefix)
    return (*prefix, max(range(len(p)), key=lambda v: (p[v], -v)))


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


def _excess(p: Distribution, q: Distribution, weight: float = 1.0) -> list[float]:
    """Return (weight p - q)+."""
    return [max(0.0, weight * p_v - q_v) for p_v, q_v in zip(p, q, strict=True)]


def _normalised(weights: Distribution) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]
