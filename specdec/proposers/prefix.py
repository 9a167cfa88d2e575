"""How a proposer recognises that a sequence went on from where it saw it last."""

from __future__ import annotations

from specdec.core.prefix_hash import EMPTY_PREFIX, extend_prefix_hash
from specdec.core.sequence import SequenceView


class SeenPrefix:
    """The committed prefix that a proposer saw last, by length and hash."""

    __slots__ = ("length", "prefix_hash")

    def __init__(self) -> None:
        self.length = 0
        self.prefix_hash = EMPTY_PREFIX

    def continues_in(self, sequence: SequenceView) -> bool:
        """Return whether the sequence begins with the prefix seen last. Costs the tokens added since."""
        if sequence.committed_len < self.length:
            return False
        added = sequence.token_ids[self.length :]
        return extend_prefix_hash(self.prefix_hash, added) == sequence.prefix_hash

    def update(self, sequence: SequenceView) -> None:
        """Remember the sequence's committed prefix."""
        self.length = sequence.committed_len
        self.prefix_hash = sequence.prefix_hash
