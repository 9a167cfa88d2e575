"""Positions that a model is given where they are not the places of its rows in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specdec.model.batch import SequenceSlice


def shifted_positions(places_T: torch.Tensor, slices: Sequence[SequenceSlice]) -> torch.Tensor | None:
    """Return the position ids, int64 [T], of rows at places of their block tables; None: these places.

    They count what a block table leaves out, and what `SequenceSlice.shift` adds.
    """
    if all(piece.shift is None and not piece.num_dropped for piece in slices):
        return None
    offsets: list[int] = []
    ends: list[int] = []
    dropped: list[int] = []
    for piece in slices:
        offset, end = piece.shift or (0, 0)
        num_rows = len(piece.token_ids)
        offsets += [offset] * num_rows
        ends += [end] * num_rows
        dropped += [piece.num_dropped] * num_rows
    offsets_T, ends_T, dropped_T = torch.tensor([offsets, ends, dropped], device=places_T.device)
    positions_T: torch.Tensor = places_T + dropped_T
    return positions_T + torch.where(positions_T < ends_T, offsets_T, 0)
