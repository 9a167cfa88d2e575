"""What a drafter guesses where tokens are made up for measurements (`made_up`). Needs no PyTorch.

At position t of a stream it guesses, the best first, (b + r) mod 256 for r = 0, 1, ..., where b is a hash of
seed and t.
"""

from __future__ import annotations

from specdec.sampling.noise import row_key

NUM_TOKENS = 256
"""Ids below this one are made up: `drafthouse_choose_made_up` in csrc/token_function.cpp knows it too."""


def guess(seed: int, position: int, rank: int = 0) -> int:
    """Return the drafter's guess number `rank` (0: what it drafts) at an absolute position."""
    return (row_key(seed, position, "draft") + rank) % NUM_TOKENS
