"""What the token function likes best of some logits."""

from __future__ import annotations

import torch

from specdec.core.sampling_params import SamplingParams
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import noisy_scores


def best_of(logits: torch.Tensor, params: SamplingParams, seed: int, position: int, num: int) -> list[int]:
    rows = SamplingRows.build([RowSpec(params, seed, position, 1)])
    best: list[int] = noisy_scores(logits[None], rows)[0].topk(num).indices.tolist()
    return best
