"""Rows of one length, cut from documents once; which rows a step takes is a pure function of (seed, step).

Documents share rows: a short one is followed by others, which attend to it, and a long one goes on in the
next row. What a tokenizer begins every text with begins every row, since no text is served without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Training rows, and their order."""

    tokens: torch.Tensor
    """int64 [N, T]."""
    batch_rows: int
    seed: int

    @classmethod
    def cut(
        cls,
        documents: Sequence[np.ndarray],
        *,
        separator: int,
        length: int,
        batch_rows: int,
        seed: int,
        lead: Sequence[int] = (),
    ) -> Rows:
        """Join documents in a seeded order, a separator before each, and cut; `lead` begins each row.

        Raises:
            ConfigError: they do not fill a batch.
        """
        order = np.random.default_rng([seed, length]).permutation(len(documents))
        pieces = [part for i in order for part in ([separator], documents[i])]
        stream = np.concatenate(pieces).astype(np.int64)
        width = length - len(lead)
        num_rows = len(stream) // width
        if num_rows < batch_rows:
            raise ConfigError(
                f"--data: {len(stream)} tokens are too few: a step takes {batch_rows} rows of {length}"
            )
        rows = torch.from_numpy(stream[: num_rows * width].reshape(num_rows, width))
        leads = torch.tensor(lead, dtype=torch.int64).expand(num_rows, -1)
        return cls(tokens=torch.cat([leads, rows], dim=1), batch_rows=batch_rows, seed=seed)

    def indices(self, number: int) -> list[int]:
        """Rows of batch ``number``, which counts over all epochs; an epoch takes each row once at most."""
        per_epoch = len(self.tokens) // self.batch_rows
        epoch, within = divmod(number, per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.tokens))
        chosen: list[int] = order[within * self.batch_rows : (within + 1) * self.batch_rows].tolist()
        return chosen
