"""Rows of the target's forward beside those that verify a draft: what a proposer has computed for itself.

They hang below the last committed token as the draft does, in a tree of their own: each sees the committed
tokens and the rows on its path, no row of the draft sees them, and they see none of it. What the target says
there goes back to the proposer, and is never committed; nor are their K/V, which lie behind those of the
draft and are overwritten later.
"""

from __future__ import annotations

import msgspec


class RowsBeside(msgspec.Struct, frozen=True, array_like=True):
    """Rows for one sequence and one round."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    """Row before each, -1: the last committed token. Parents precede their children."""
    num_answered: int
    """At the last so many, what the token function chooses is wanted, at the noise of their positions: of the
    stream that the verification rule lets drafts be drawn with."""

    @property
    def num_rows(self) -> int:
        """How many there are."""
        return len(self.token_ids)
