"""Distributions over token ids in a form that crosses the wire and needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np


class TokenDistribution(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one row that have a probability, all others having none."""

    token_ids: bytes
    """uint32 of the machine's byte order, ascending."""
    probabilities: bytes
    """float32, as many, none below 0; their sum is 1 but for rounding."""

    def fault(self, drawn: int, vocab_size: int) -> str | None:
        """Return what keeps `drawn` from having been drawn from this row, or None.

        Sums are not looked at: what matters is that the row is what the token was drawn from, and no check
        can see that.
        """
        if len(self.token_ids) % 4 or len(self.probabilities) % 4:
            return "bytes that are no whole numbers"
        ids = np.frombuffer(self.token_ids, np.uint32)
        probabilities = np.frombuffer(self.probabilities, np.float32)
        if len(ids) != len(probabilities):
            return f"{len(ids)} token ids with {len(probabilities)} probabilities"
        if not (ids[:-1] < ids[1:]).all():
            return "token ids that do not ascend"
        if len(ids) and ids[-1] >= vocab_size:
            return f"token ids beyond a vocabulary of {vocab_size}"
        if not ((probabilities >= 0.0) & (probabilities < np.inf)).all():
            return "probabilities that are none"
        place = np.searchsorted(ids, drawn)
        if place == len(ids) or ids[place] != drawn or not probabilities[place] > 0.0:
            return f"token {drawn} has no probability"
        return None


def rows_fault(rows: Sequence[TokenDistribution], token_ids: Sequence[int], vocab_size: int) -> str | None:
    """Return what keeps `token_ids` from having been drawn from `rows`, one each, or None."""
    if len(rows) != len(token_ids):
        return f"{len(token_ids)} tokens with {len(rows)} rows"
    faults = [row.fault(drawn, vocab_size) for row, drawn in zip(rows, token_ids, strict=True)]
    return next((fault for fault in faults if fault is not None), None)
