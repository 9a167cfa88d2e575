"""Bounded memory for a draft model: the beginning of a sequence and a window of its last tokens.

Blocks that a selection policy (`kv.selection`) leaves out are freed for good as the sequence grows, so what a
sequence holds does not depend on how long it is. A long prompt is read in pieces, each of which attends to
what is kept, and to itself.

Rows that were read behind the window have K/V that depend on where it was, and so on how the prompt was cut:
what is proposed may depend on it, what is committed does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.kv.block_table import BlockTable, num_blocks_for
from specdec.kv.selection import KvSelection


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWindow:
    """What of each sequence a draft model keeps."""

    selection: KvSelection
    """A policy whose gap only grows with the sequence: what has been left out is not there any more."""
    num_piece_tokens: int
    """Committed tokens that are read at once, beside what is kept."""
    num_draft_tokens: int
    """Tokens behind the committed ones that are read at most: pending ones and drafts."""

    def slide(self, table: BlockTable, num_read: int) -> None:
        """Free the blocks that are left out once `num_read` tokens are cached."""
        selected = self.selection.select(num_read)
        num_blocks = (selected.num_dropped - table.num_dropped) // table.block_size
        if num_blocks <= 0:
            return
        first = next(place for place, index in enumerate(selected.blocks) if place != index)
        table.drop(first, num_blocks)

    def reach(self, num_tokens: int, committed_len: int, num_read: int) -> int:
        """Return for how many of `num_tokens` tokens there have to be blocks now, dropped ones included."""
        if committed_len - num_read <= self.num_piece_tokens:
            return num_tokens
        return num_read + self.num_piece_tokens

    def max_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return how many blocks a sequence of up to so many tokens holds at most."""
        kept = num_tokens - self.selection.select(num_tokens).num_dropped
        # One more: the gap is that of fewer tokens than this while the last of them are read.
        num_blocks = 1 + num_blocks_for(kept + self.num_piece_tokens + self.num_draft_tokens, block_size)
        return min(num_blocks, num_blocks_for(num_tokens, block_size))
