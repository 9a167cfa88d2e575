"""Sampling parameters per row of logits, built once per round from one entry per sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.core.sampling_params import SamplingParams
from specdec.sampling.noise_rows import as_signed

KEEP_ALL_TOP_K = (1 << 31) - 1
"""Stands for "no top-k" in `SamplingRows.top_k`."""


class RowSpec(NamedTuple):
    """The rows of one sequence."""

    params: SamplingParams
    seed: int
    """Noise key of the stream, unsigned 64-bit (`Request.seed`)."""
    first_position: int
    """Absolute position of the token that the first row samples."""
    num_rows: int
    depths: Sequence[int] | None = None
    """Trees: row i samples position first_position + depths[i]; None: first_position + i."""


def top_k_of(params: SamplingParams) -> int:
    """Return the top-k that a row gets, `KEEP_ALL_TOP_K` for none."""
    return min(params.top_k or KEEP_ALL_TOP_K, KEEP_ALL_TOP_K)


def log_min_p_of(params: SamplingParams) -> float:
    """Return the least log p, relative to the largest, that a row keeps."""
    return math.log(params.min_p) if params.min_p > 0.0 else -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """What the sampler needs to know about R rows. Two tensors, so that a device gets them in two copies."""

    integers: torch.Tensor
    """int64 [3, R]: seed (its 64 bits), position, top-k."""
    reals: torch.Tensor
    """float64 [3, R]: temperature (0: greedy), top-p, log of min-p."""
    has_greedy: bool
    has_sampled: bool
    largest_top_k: int
    """Largest top-k of the rows that have one; 0 when none has."""
    has_top_p: bool
    has_min_p: bool

    @staticmethod
    def build(specs: Sequence[RowSpec], device: torch.device | str = "cpu") -> SamplingRows:
        """Return the rows of all sequences, one after the other, on `device`."""
        integers: list[tuple[int, int, int]] = []
        reals: list[tuple[float, float, float]] = []
        counts: list[int] = []
        num_greedy = largest_top_k = 0
        has_top_p = has_min_p = False
        for params, seed, first_position, num_rows, _ in specs:
            if params.temperature == 0.0:
                num_greedy += 1
            else:  # the cuts never move the peak, so greedy rows need none
                if params.top_k is not None:
                    largest_top_k = max(largest_top_k, params.top_k)
                has_top_p |= params.top_p < 1.0
                has_min_p |= params.min_p > 0.0
            integers.append((as_signed(seed), first_position, top_k_of(params)))
            reals.append((params.temperature, params.top_p, log_min_p_of(params)))
            counts.append(num_rows)
        counts_S = np.array(counts, dtype=np.int64)
        integers_R3 = np.array(integers, dtype=np.int64).reshape(-1, 3).repeat(counts_S, 0)
        integers_R3[:, 1] += _offsets(specs, counts_S)
        reals_R3 = np.array(reals, dtype=np.float64).reshape(-1, 3).repeat(counts_S, 0)
        return SamplingRows(
            integers=torch.from_numpy(integers_R3.T.copy()).to(device),
            reals=torch.from_numpy(reals_R3.T.copy()).to(device),
            has_greedy=num_greedy > 0,
            has_sampled=num_greedy < len(counts),
            largest_top_k=largest_top_k,
            has_top_p=has_top_p,
            has_min_p=has_min_p,
        )

    @property
    def num_rows(self) -> int:
        """R."""
        return self.integers.shape[1]

    @property
    def seeds(self) -> torch.Tensor:
        """int64 [R]: the bits of the unsigned seeds."""
        return self.integers[0]

    @property
    def positions(self) -> torch.Tensor:
        """int64 [R]: absolute positions of the sampled tokens."""
        return self.integers[1]

    @property
    def top_k(self) -> torch.Tensor:
        """int64 [R], `KEEP_ALL_TOP_K` where there is none."""
        return self.integers[2]

    @property
    def temperature(self) -> torch.Tensor:
        """fp32 [R], 0 in greedy rows."""
        return self.reals[0].float()

    @property
    def top_p(self) -> torch.Tensor:
        """float64 [R], 1 where there is none."""
        return self.reals[1]

    @property
    def log_min_p(self) -> torch.Tensor:
        """fp32 [R], -inf where there is none."""
        return self.reals[2].float()


def _offsets(specs: Sequence[RowSpec], counts_S: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each row's distance from its sequence's first position."""
    if all(spec.depths is None for spec in specs):
        ends_S = counts_S.cumsum()
        return np.arange(counts_S.sum()) - np.repeat(ends_S - counts_S, counts_S)
    offsets: list[int] = []
    for spec in specs:
        depths = range(spec.num_rows) if spec.depths is None else spec.depths
        if len(depths) != spec.num_rows:
            raise ValueError(f"{spec.num_rows} rows with {len(depths)} depths")
        offsets.extend(depths)
    return np.array(offsets, dtype=np.int64)
