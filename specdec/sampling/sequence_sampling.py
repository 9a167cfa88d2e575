"""What decides the tokens of one sequence: known where there is no PyTorch, as in coordinators."""

from __future__ import annotations

from typing import NamedTuple

from specdec.core.sampling_params import SamplingParams


class SequenceSampling(NamedTuple):
    """What decides the tokens of one sequence beside its logits and their positions."""

    params: SamplingParams
    seed: int
    """Noise key, unsigned 64-bit (`Request.seed`)."""
