"""A 64-bit hash of a token prefix, extended token by token.

It tells two prefixes of equal length apart (a drafter's reply belongs to exactly one prefix), so it
must be the same on every machine and cheap to extend; it need not resist an adversary.
"""

from __future__ import annotations

from collections.abc import Iterable

_MASK_64 = (1 << 64) - 1
EMPTY_PREFIX = 0x9E3779B97F4A7C15
"""Hash of the empty prefix."""


def extend_prefix_hash(prefix_hash: int, token_ids: Iterable[int]) -> int:
    """Return the hash of the prefix that `prefix_hash` stands for, followed by `token_ids`.

    The mixing step is the splitmix64 finaliser (Steele et al., 2014) over state xor token.
    """
    state = prefix_hash
    for token_id in token_ids:
        state = (state + 0x9E3779B97F4A7C15 + token_id) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state
