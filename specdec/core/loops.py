"""Texts that fall into a loop: drafts are accepted all too easily there, so they are counted apart."""

from __future__ import annotations

from collections.abc import Sequence

LOOP_WINDOW = 64
LOOP_LONGEST_PERIOD = 32


def ends_in_loop(token_ids: Sequence[int]) -> bool:
    """Whether the last 64 tokens repeat themselves with a period of at most 32 tokens."""
    tail = list(token_ids[-LOOP_WINDOW:])
    if len(tail) < LOOP_WINDOW:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, LOOP_LONGEST_PERIOD + 1))
