"""q rows between what crosses the wire and what rules compute with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec.core.distributions import TokenDistribution


def pack_rows(q_RV: torch.Tensor) -> list[TokenDistribution]:
    """Return the rows of a tensor [R, V] of probabilities, without what is 0."""
    rows = []
    for q_V in q_RV.float().cpu().numpy():
        ids = np.flatnonzero(q_V)
        rows.append(TokenDistribution(ids.astype(np.uint32).tobytes(), q_V[ids].tobytes()))
    return rows


def unpack_rows(rows: Sequence[TokenDistribution], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return float64 [R, vocab_size] of rows without `fault`, each summing to 1."""
    dense_RV = np.zeros((len(rows), vocab_size))
    for dense_V, row in zip(dense_RV, rows, strict=True):
        probabilities = np.frombuffer(row.probabilities, np.float32).astype(np.float64)
        dense_V[np.frombuffer(row.token_ids, np.uint32)] = probabilities / probabilities.sum()
    return torch.from_numpy(dense_RV).to(device)
