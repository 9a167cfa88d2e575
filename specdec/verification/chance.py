"""Random decisions from counter-based noise: a replay makes the same ones."""

from __future__ import annotations

import torch

from specdec.core.proposal import NoiseStream
from specdec.sampling.noise import row_key, uniform
from specdec.sampling.noise_rows import as_signed, gumbel_rows


class CounterChance:
    """Decisions for one seed: noise streams "accept" for tests, "residual", and "target" for bonus tokens.

    A position's noise is looked at once at most: decisions at positions beyond the last token committed do
    not happen, so those positions are fresh in the next round.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def accept(self, probability: float, position: int, test: int) -> bool:
        """Decide by u < probability, strictly: nothing of probability zero is ever accepted."""
        return uniform(self._seed, position, test, "accept") < probability

    def draw_residual(self, weights: torch.Tensor, position: int) -> int:
        """Draw by argmax(log weight + g)."""
        return self._draw(weights, position, "residual")

    def draw_target(self, weights: torch.Tensor, position: int) -> int:
        """Draw by argmax(log weight + g) with the noise of the token function."""
        return self._draw(weights, position, "target")

    def _draw(self, weights: torch.Tensor, position: int, stream: NoiseStream) -> int:
        key = torch.tensor([as_signed(row_key(self._seed, position, stream))], device=weights.device)
        noise = gumbel_rows(key, weights.shape[0])[0]
        return int((weights.log() + noise).argmax())
