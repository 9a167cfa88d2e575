"""Tokens that are made up, for measurements: what a drafter guesses, and whether the target agrees.

The forwards, the noise, the kernels and the messages are real; only which token comes out is decided by a
seeded generator (`noise`), so that speed can be measured at any acceptance without a drafter that has it.

What a drafter guesses is in `made_up_tokens`. The target answers with one of its guesses, or with none; see
`engine.synthetic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specdec.core.proposal import NoiseStream
from specdec.model.batch import NativeChooser
from specdec.sampling.made_up_tokens import guess
from specdec.sampling.rows import SamplingRows
from specdec.sampling.sampler import SampledRows, Sampler
from specdec.sampling.sequence_sampling import SequenceSampling

if TYPE_CHECKING:
    import torch


class MadeUpChooser(Sampler):
    """A sampler that goes through the motions, and then guesses."""

    def sample(
        self, logits_RV: torch.Tensor, rows: SamplingRows, stream: NoiseStream = "target"
    ) -> SampledRows:
        """Return each row's best guess."""
        sampled = super().sample(logits_RV, rows, stream)
        guesses = [guess(seed, position) for seed, position in _places(rows)]
        return SampledRows(sampled.token_ids.new_tensor(guesses), sampled.finite)

    def ranked(
        self, logits_RV: torch.Tensor, rows: SamplingRows, num: int, stream: NoiseStream | None = "target"
    ) -> list[list[int]]:
        """Return each row's best guesses."""
        super().ranked(logits_RV, rows, num, stream)
        return [[guess(seed, position, rank) for rank in range(num)] for seed, position in _places(rows)]

    def chooser(
        self, sequences: Sequence[SequenceSampling], vocab_size: int, stream: NoiseStream = "target"
    ) -> NativeChooser | None:
        """See `TokenChooser`."""
        native = self._native
        return None if native is None else native.chooser(sequences, vocab_size, stream, is_made_up=True)

    def ranker(self, *_: object, **__: object) -> None:
        """Return None: guesses are made up row by row."""


def _places(rows: SamplingRows) -> list[tuple[int, int]]:
    """Return seed and position of each row."""
    return list(zip(rows.seeds.tolist(), rows.positions.tolist(), strict=True))
