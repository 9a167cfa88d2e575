"""Bounded memory for what drafts on K/V of its own: the beginning of a sequence, and its last tokens.

Blocks that a selection policy (`kv.selection`) leaves out are freed for good as the sequence grows, so what a
sequence holds does not depend on how long it is. A long prompt is read in pieces, each of which attends to
what is kept, and to itself.

Rows that were read behind the window have K/V that depend on where it was, and so on how the prompt was cut:
what is proposed may depend on it, what is committed does not.

A draft model with fewer positions than a text has can be given others (`num_positions`): it reads the
beginning and the window as one text, from position 0 on, and goes on with the positions that follow. When
they run out it reads what is the window by then in the same way. So what it is given is always a text of a
length that it was made for, whatever its positions are made of (any rotary embedding, or learned ones), and
of a prompt that is longer than that it reads the two ends alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from specdec.kv.block_table import BlockTable, num_blocks_for
from specdec.kv.selection import KvSelection

if TYPE_CHECKING:
    from specdec.proposers.config import SpeculativeConfig

ANY_LENGTH = 1 << 40
"""Tokens of a text without limit."""
_PIECES_PER_BUDGET = 4
"""A prompt is read in pieces of one in so many tokens of the budget: the memory of one comes on top of it."""
_LONGEST_PIECE = 512
"""Tokens; longer ones are read no faster."""


class Origin(NamedTuple):
    """Where in a text the positions that a draft model is given begin."""

    position: int
    """Position in the text of what is given position 0; 0: positions are those of the text."""
    num_sink_tokens: int
    """Tokens of the beginning of the text that are read in place of those from `position` on."""

    def tokens(self, token_ids: Sequence[int], start: int, end: int) -> Sequence[int]:
        """Return what is read in place of tokens `start` to `end` of a text."""
        sink_end = self.position + self.num_sink_tokens
        if start >= sink_end or not self.position:
            return token_ids[start:end]
        sink = token_ids[start - self.position : min(end, sink_end) - self.position]
        return [*sink, *token_ids[sink_end:end]]


AT_THE_BEGINNING = Origin(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWindow:
    """What of each sequence a draft model keeps, or heads with K/V of their own."""

    selection: KvSelection
    """A policy whose gap only grows with the sequence: what has been left out is not there any more."""
    num_piece_tokens: int
    """Committed tokens that are read at once, beside what is kept."""
    num_draft_tokens: int
    """Tokens behind the committed ones that are read at most: pending ones and drafts."""
    num_positions: int | None = None
    """Positions that the draft model has, where tokens are given positions among what is kept; what is
    selected, two more blocks and `num_draft_tokens` are fewer. None: tokens keep their positions in the
    text."""

    def origin(self, current: Origin, committed_len: int, block_size: int, budget: int = 0) -> Origin:
        """Return where positions begin now that they have begun at `current`: there, while they last.

        Then so that a budget of tokens is kept (0: as configured).
        """
        end = committed_len + self.num_draft_tokens
        if self.num_positions is None or end - current.position <= self.num_positions:
            return current
        selected = self.selection.select(committed_len, budget=budget)
        num_sink_blocks = next(place for place, index in enumerate(selected.blocks) if place != index)
        return Origin(selected.num_dropped, num_sink_blocks * block_size)

    def slide(self, table: BlockTable, num_read: int, budget: int = 0) -> None:
        """Free the blocks that are left out once `num_read` tokens are cached, by a budget of tokens.

        0: as configured. Where it has grown, nothing is freed until the window has grown into it.
        """
        selected = self.selection.select(num_read, budget=budget)
        num_blocks = (selected.num_dropped - table.num_dropped) // table.block_size
        if num_blocks <= 0:
            return
        first = next(place for place, index in enumerate(selected.blocks) if place != index)
        table.drop(first, num_blocks)

    def most_budget(self, num_tokens: int, num_blocks: int, block_size: int) -> int:
        """Return the largest budget (tokens) by which a sequence fits into `num_blocks` blocks by itself.

        Or, where that is more, the one that is configured for a sequence of `num_tokens` tokens. Of positions
        among what is kept, half may be taken, as long as more is not configured: the rest lasts until the
        next reading.
        """
        around = self.num_piece_tokens + self.num_draft_tokens
        kept = num_tokens - self.selection.select(num_tokens).num_dropped
        # Parts are rounded up to whole blocks, three of them (see `max_blocks`), and so is what is around.
        room = (num_blocks - 4) * block_size - around
        if self.num_positions is None:
            return max(kept, room)
        most = max(kept, min(self.num_positions // 2, room))
        return min(most, self.num_positions - 2 * block_size - self.num_draft_tokens)

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

    def max_held_tokens(self, num_tokens: int, block_size: int) -> int:
        """Return `max_blocks` in tokens."""
        return self.max_blocks(num_tokens, block_size) * block_size


def draft_window(config: SpeculativeConfig, num_positions: int | None = None) -> DraftWindow | None:
    """Return what of each sequence the configured drafter keeps; None: everything.

    `num_positions` are those that a draft model has, where it is given positions among what is kept.
    """
    if config.kv.policy == "full":
        return None
    block_size = config.cache.block_size
    smallest = [budget.smallest for budget in config.kv.budgets]
    most_tokens = None
    if num_positions is not None:
        # A share that grows with the text takes half of them at most, unless more is configured in any case:
        # the rest lasts until the next reading.
        most_tokens = max(*smallest, min(num_positions // 2, num_positions - config.num_beside_budget))
    return DraftWindow(
        selection=config.kv.make(block_size, config.kv.largest, most_tokens=most_tokens),
        num_piece_tokens=min(max(block_size, min(smallest) // _PIECES_PER_BUDGET), _LONGEST_PIECE),
        num_draft_tokens=config.num_read_behind,
        num_positions=num_positions,
    )


def small_pool_warning(
    config: SpeculativeConfig, num_blocks: int, longest: int, num_positions: int | None = None
) -> str | None:
    """Say that a pool of `num_blocks` blocks is smaller than the window of one sequence; None: it is not.

    One of the blocks is scratch. Sequences grow to `longest` tokens; `num_positions` as for `draft_window`.
    Not a mistake by itself: where texts are short they have drafts, as without a window.
    """
    window, cache = draft_window(config, num_positions), config.cache
    if window is None:
        return None
    num_needed = 1 + window.max_blocks(longest, cache.block_size)
    if num_needed <= num_blocks:
        return None
    size = next(name for name in ("num_blocks", "memory_bytes", "memory_fraction") if getattr(cache, name))
    return (
        f"speculative_config.cache.{size}: {getattr(cache, size)} makes a pool of {num_blocks} blocks of "
        f"{cache.block_size} tokens, and the window of speculative_config.kv.budget: "
        f"{config.kv.largest_budget(longest).amount} takes up to {num_needed}: texts of more than "
        f"{(num_blocks - 1) * cache.block_size} tokens go on without drafts; give the pool more, or "
        "the window less"
    )
