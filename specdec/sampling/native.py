"""The token function as compiled code for CPUs: calls `csrc/token_function.cpp`."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from specdec.attention.native import load_library, resolve_cache_dir
from specdec.core.proposal import NoiseStream
from specdec.model.batch import NativeChooser
from specdec.sampling.noise import STREAM_TAGS
from specdec.sampling.rows import SamplingRows, log_min_p_of, top_k_of
from specdec.sampling.sequence_sampling import SequenceSampling

SOURCE = Path(__file__).parent / "csrc" / "token_function.cpp"
_NOTHING = -1
"""Stands behind the last of a row's ranked tokens."""
_PARAMETERS = struct.Struct("=Qqddd")
"""`Parameters` in the C++ source."""
_LOGITS_PER_THREAD = 1 << 19
"""Below about 0.3 ms of work per thread, waking another one costs more than it gives."""


class NativeTokenFunction:
    """`sampler.sample_eager` for fp32 logits on a CPU: the same choices, some fifty times as fast."""

    def __init__(self, cache_dir: str | Path | None = None) -> None:
        """Load the library from the cache folder (None: the user's), or build it, in about a second.

        Raises:
            NativeUnavailable: no compiler, a failed build, or a folder that cannot be written.
        """
        library = load_library(SOURCE, resolve_cache_dir(cache_dir))
        self._choose = _address(library.drafthouse_choose)
        self._choose_made_up = _address(library.drafthouse_choose_made_up)
        self._rank = _address(library.drafthouse_rank)
        self._sample_rows = library.drafthouse_sample_rows
        self._sample_rows.restype = None
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._sample_rows.argtypes = (
            *(pointer, integer, integer, integer),
            *(pointer, pointer, ctypes.c_uint64, ctypes.c_int32),
            *(pointer, pointer),
        )
        self._rank_rows = library.drafthouse_rank_rows
        self._rank_rows.restype = None
        self._rank_rows.argtypes = (
            *(pointer, integer, integer, integer),
            *(pointer, pointer, ctypes.c_uint64, ctypes.c_int32),
            *(integer, ctypes.c_int32, pointer),
        )

    def __call__(
        self, logits_RV: torch.Tensor, rows: SamplingRows, stream: NoiseStream
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (token ids int64 [R], finite bool [R]) of fp32 CPU logits whose rows are contiguous."""
        _check(logits_RV, rows)
        num_rows, vocab_size = logits_RV.shape
        num_threads = min(torch.get_num_threads(), 1 + num_rows * vocab_size // _LOGITS_PER_THREAD)
        token_ids_R = torch.empty(num_rows, dtype=torch.int64)
        finite_R = torch.empty(num_rows, dtype=torch.bool)
        self._sample_rows(
            *(logits_RV.data_ptr(), logits_RV.stride(0), num_rows, vocab_size),
            *(rows.integers.data_ptr(), rows.reals.data_ptr(), STREAM_TAGS[stream], num_threads),
            *(token_ids_R.data_ptr(), finite_R.data_ptr()),
        )
        return token_ids_R, finite_R

    def ranked(
        self, logits_RV: torch.Tensor, rows: SamplingRows, num: int, stream: NoiseStream | None
    ) -> list[list[int]]:
        """Return what `sampler.ranked_tokens` does of fp32 CPU logits whose rows are contiguous."""
        _check(logits_RV, rows)
        num_rows, vocab_size = logits_RV.shape
        num_threads = min(torch.get_num_threads(), 1 + num_rows * vocab_size // _LOGITS_PER_THREAD)
        token_ids_RN = torch.empty((num_rows, num), dtype=torch.int64)
        self._rank_rows(
            *(logits_RV.data_ptr(), logits_RV.stride(0), num_rows, vocab_size),
            *(rows.integers.data_ptr(), rows.reals.data_ptr()),
            *(STREAM_TAGS[stream or "target"], stream is not None, num, num_threads, token_ids_RN.data_ptr()),
        )
        ranked: list[list[int]] = token_ids_RN.tolist()
        return [ids[: ids.index(_NOTHING)] if _NOTHING in ids else ids for ids in ranked]

    def chooser(
        self,
        sequences: Sequence[SequenceSampling],
        vocab_size: int,
        stream: NoiseStream,
        *,
        is_made_up: bool = False,
    ) -> NativeChooser:
        """Return the function for other compiled code to call; see `Sampler.chooser`, and `made_up`."""
        parameters = _packed(sequences)
        given = array("Q", (parameters.buffer_info()[0], vocab_size, STREAM_TAGS[stream]))
        choose = self._choose_made_up if is_made_up else self._choose
        return NativeChooser(choose, given.buffer_info()[0], (given, parameters))

    def ranker(
        self,
        sequences: Sequence[SequenceSampling],
        vocab_size: int,
        stream: NoiseStream | None,
        *,
        num: int,
        num_rows: int,
        has_confidence: bool,
    ) -> NativeRanker:
        """Return the function for other compiled code to call; see `Sampler.ranker`."""
        parameters = _packed(sequences)
        token_ids = array("q", (_NOTHING,)) * (num_rows * num)
        log_confidences = array("f", (0.0,)) * (num_rows * num)
        given = array(
            "Q",
            (
                *(parameters.buffer_info()[0], vocab_size, STREAM_TAGS[stream or "target"]),
                *(stream is not None, num, token_ids.buffer_info()[0]),
                log_confidences.buffer_info()[0] if has_confidence else 0,
            ),
        )  # `RankerParameters` in the C++ source
        chooser = NativeChooser(self._rank, given.buffer_info()[0], (given, parameters))
        return NativeRanker(chooser, num, token_ids, log_confidences)


class NativeRanker(NamedTuple):
    """Compiled code that ranks tokens where others choose one, and room for what it finds."""

    chooser: NativeChooser
    """For the forward to call: what is chosen is the first of the ranked."""
    num: int
    token_ids: array[int]
    log_confidences: array[float]

    def ranked(self) -> list[list[tuple[int, float]]]:
        """Return (token, log confidence) of each row, the best first, once the forward has run."""
        found: list[list[tuple[int, float]]] = []
        for first in range(0, len(self.token_ids), self.num):
            ids = self.token_ids[first : first + self.num].tolist()
            count = ids.index(_NOTHING) if _NOTHING in ids else self.num
            found.append(list(zip(ids[:count], self.log_confidences[first : first + count], strict=True)))
        return found


def _packed(sequences: Sequence[SequenceSampling]) -> array[int]:
    """Return what `Parameters` of the C++ source says of each."""
    return array(
        "b",
        b"".join(
            [
                _PARAMETERS.pack(
                    seed, top_k_of(params), params.temperature, params.top_p, log_min_p_of(params)
                )
                for params, seed in sequences
            ]
        ),
    )


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address


def _check(logits_RV: torch.Tensor, rows: SamplingRows) -> None:
    assert logits_RV.dtype == torch.float32
    assert logits_RV.stride(1) == 1
    assert rows.integers.is_contiguous()
    assert rows.reals.is_contiguous()
