"""Distributions over token ids in a form that crosses the wire and needs no torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec


class TokenDistribution(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one row that have a probability, all others having none."""

    token_ids: bytes
    """uint32 of the machine's byte order, all different."""
    probabilities: bytes
    """float32, as many; their sum is 1 but for rounding."""

    def fault(self, drawn: int, vocab_size: int) -> str | None:
        """Return what keeps `drawn` from having been drawn from this row, or None.

        Sums are not looked at: what matters is that the row is what the token was drawn from, and no check
        can see that.
        """
        ids, probabilities = array("I"), array("f")
        if len(self.token_ids) % ids.itemsize or len(self.probabilities) % probabilities.itemsize:
            return "bytes that are no whole numbers"
        ids.frombytes(self.token_ids)
        probabilities.frombytes(self.probabilities)
        if len(ids) != len(probabilities):
            return f"{len(ids)} token ids with {len(probabilities)} probabilities"
        if max(ids, default=0) >= vocab_size:
            return f"token ids beyond a vocabulary of {vocab_size}"
        if drawn not in ids or not probabilities[ids.index(drawn)] > 0.0:
            return f"token {drawn} has no probability"
        return None


def rows_fault(rows: Sequence[TokenDistribution], token_ids: Sequence[int], vocab_size: int) -> str | None:
    """Return what keeps `token_ids` from having been drawn from `rows`, one each, or None."""
    if len(rows) != len(token_ids):
        return f"{len(token_ids)} tokens with {len(rows)} rows"
    faults = [row.fault(drawn, vocab_size) for row, drawn in zip(rows, token_ids, strict=True)]
    return next((fault for fault in faults if fault is not None), None)
