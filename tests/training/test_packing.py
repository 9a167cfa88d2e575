from __future__ import annotations

import numpy as np
import pytest
import torch

from training.packing import PackedBatches


def _batches(documents: list[np.ndarray], **changes: int) -> PackedBatches:
    settings = {"separator": 0, "row_tokens": 10, "batch_rows": 4, "seed": 3} | changes
    return PackedBatches(documents=documents, **settings)


def test_batches_are_a_function_of_seed_and_index(tiny_documents: list[np.ndarray]) -> None:
    straight = [_batches(tiny_documents).batch(i) for i in range(30)]
    jumping = _batches(tiny_documents)
    for index in (29, 3, 17):
        assert torch.equal(jumping.batch(index), straight[index])
    assert not torch.equal(_batches(tiny_documents, seed=4).batch(0), straight[0])


def test_an_epoch_shows_every_row_once(tiny_documents: list[np.ndarray]) -> None:
    batches = _batches(tiny_documents)
    rows = torch.cat([batches.batch(i) for i in range(batches.batches_per_epoch)])
    assert len(torch.unique(rows, dim=0)) == len(rows)
    assert batches.batch(batches.batches_per_epoch).shape == (4, 10)


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="too few"):
        _batches([np.zeros(12, dtype=np.uint16)]).batch(0)
