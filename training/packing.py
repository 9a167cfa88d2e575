"""Packed token streams whose batches are a pure function of (seed, number): a resume needs no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatches:
    """Fixed-length training rows cut from documents that are joined by a separator.

    Each epoch permutes the documents, joins them (separator before each), cuts rows of ``row_tokens`` from
    a random offset and permutes the rows. ``batch(i)`` depends on ``(documents, seed, i)`` alone.
    """

    documents: Sequence[np.ndarray]
    """Token ids, one uint16 array per document."""
    separator: int
    row_tokens: int
    """Tokens per row, labels included (a causal loss over T positions needs T + 1)."""
    batch_rows: int
    seed: int
    _epoch_rows: dict[int, np.ndarray] = field(default_factory=dict)

    def _rows_of_epoch(self, epoch: int) -> np.ndarray:
        """int array [rows, row_tokens] of one epoch; only the latest epoch is kept."""
        if epoch not in self._epoch_rows:
            self._epoch_rows.clear()
            rng = np.random.default_rng([self.seed, epoch, self.row_tokens])
            separator = np.asarray([self.separator], dtype=np.uint16)
            pieces = [
                part for i in rng.permutation(len(self.documents)) for part in (separator, self.documents[i])
            ]
            stream = np.concatenate(pieces)[rng.integers(self.row_tokens) :]
            num_rows = len(stream) // self.row_tokens
            rows = stream[: num_rows * self.row_tokens].reshape(num_rows, self.row_tokens)
            self._epoch_rows[epoch] = rows[rng.permutation(num_rows)]
        return self._epoch_rows[epoch]

    @property
    def batches_per_epoch(self) -> int:
        """Full batches in every epoch (the offset may cost one row)."""
        total = sum(len(document) + 1 for document in self.documents)
        count = (total // self.row_tokens - 1) // self.batch_rows
        if count < 1:
            raise ValueError(
                f"{total} tokens are too few for one batch of {self.batch_rows} x {self.row_tokens}"
            )
        return count

    def batch(self, index: int) -> torch.Tensor:
        """int64 [batch_rows, row_tokens]; ``index`` counts from 0 over all epochs."""
        epoch, within = divmod(index, self.batches_per_epoch)
        rows = self._rows_of_epoch(epoch)[within * self.batch_rows : (within + 1) * self.batch_rows]
        return torch.from_numpy(rows.astype(np.int64))
