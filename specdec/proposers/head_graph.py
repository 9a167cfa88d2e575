"""Chains of heads as CUDA graphs: all depths, and the choices between them, are one launch.

S sequences that draft, R numbers of a row that heads read, K depths, V token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from specdec.core.proposal import NoiseStream
from specdec.drafters.base import HeadsDrafter, SequentialHeads
from specdec.model.batch import NO_TOKEN
from specdec.model.config import CompileConfig
from specdec.model.cuda_graphs import GraphRecording
from specdec.model.graph_recorder import CudaRecorder, Recorder
from specdec.model.row_buckets import sequence_buckets, smallest_holding
from specdec.model.static_batch import PackedArrays
from specdec.proposers.draft_graph import (
    BYTES_PER_SCORE,
    MAX_TOP_K,
    GraphSize,
    adjustable_rows,
    leave_to_nobody,
    until_end,
)
from specdec.sampling.rows import RowSpec, SamplingRows
from specdec.sampling.sampler import sample_eager
from specdec.sampling.sequence_sampling import SequenceSampling


class HeadStart(NamedTuple):
    """One sequence to draft for."""

    last_token_id: int
    sampling: SequenceSampling
    position: int
    """Of the first draft token."""
    budget: int


def head_loop_bytes(heads: HeadsDrafter, config: CompileConfig, max_num_seqs: int) -> int:
    """Return about how much memory recorded chains are going to take."""
    if config.mode == "off" or next(heads.parameters()).device.type != "cuda":
        return 0
    return min(max_num_seqs, config.cuda_graph_max_rows) * heads.target.vocab_size * BYTES_PER_SCORE


class GraphedHeads(GraphRecording):
    """What `HeadProposer` asks first on a GPU."""

    def __init__(
        self,
        heads: HeadsDrafter,
        config: CompileConfig,
        *,
        name: str,
        vocab_size: int,
        num_draft_tokens: int,
        max_num_seqs: int,
        stream: NoiseStream = "target",
        recorder: Recorder | None = None,
    ) -> None:
        """Prepare; nothing is recorded yet.

        Args:
            heads: on a GPU, unless there is a recorder for where they are.
            config: whether to record.
            name: for people.
            vocab_size: tokens from here on are never chosen.
            num_draft_tokens: most depths that are asked for.
            max_num_seqs: most sequences that draft at once.
            stream: noise that the tokens are chosen with.
            recorder: None takes CUDA's own.
        """
        self._heads = heads
        self._weight = next(heads.parameters())
        self._vocab_size = min(vocab_size, heads.target.vocab_size)
        self._num_tokens = min(num_draft_tokens, heads.max_depth)
        self._stream: NoiseStream = stream
        self._recorder = recorder
        self._chains: dict[GraphSize, _Chains] = {}
        self._planned: list[GraphSize] = []
        can_record = recorder is not None or self._weight.device.type == "cuda"
        most = min(max_num_seqs, config.cuda_graph_max_rows)
        if can_record and config.mode == "auto" and most:
            sizes = reversed(sequence_buckets(most))
            self._planned = [GraphSize(size, cuts) for size in sizes for cuts in (False, True)]
        super().__init__(name, len(self._planned))

    @torch.inference_mode()
    def try_draft(self, rows_SR: torch.Tensor, starts: Sequence[HeadStart]) -> list[list[int]] | None:
        """Return the chain of each start, from its row; None until a graph that holds them is recorded."""
        rows = SamplingRows.build([RowSpec(*start.sampling, start.position, 1) for start in starts])
        if rows.largest_top_k > MAX_TOP_K:
            return None
        sizes = sorted({size.num_seqs for size in self._chains})
        num_seqs = smallest_holding(sizes, len(starts))
        cuts = bool(rows.largest_top_k or rows.has_top_p or rows.has_min_p)
        chains = None if num_seqs is None else self._chains.get(GraphSize(num_seqs, cuts))
        if chains is None:
            return None
        drafted = chains.draft(rows_SR, [start.last_token_id for start in starts], rows)
        return [until_end(chain[: start.budget]) for chain, start in zip(drafted, starts, strict=True)]

    def _record_all(self) -> Iterator[None]:
        recorder = CudaRecorder(self._weight.device) if self._recorder is None else self._recorder
        for size in self._planned:
            with torch.inference_mode():
                chains = _Chains(self._heads, size, self._num_tokens, self._vocab_size, self._stream)
                chains.record(recorder)
            self._chains[size] = chains
            yield

    def _forget(self) -> None:
        self._chains.clear()


class _Chains:
    """Chains of at most so many sequences."""

    def __init__(
        self, heads: HeadsDrafter, size: GraphSize, num_tokens: int, vocab_size: int, stream: NoiseStream
    ) -> None:
        weight, num_seqs = next(heads.parameters()), size.num_seqs
        self._heads, self._cuts = heads, size.cuts
        self._vocab_size = vocab_size
        self._stream: NoiseStream = stream
        self._rows = weight.new_zeros(num_seqs, heads.prepared_size)
        self._tokens = torch.zeros(num_seqs, num_tokens, dtype=torch.int64, device=weight.device)
        self._arrays = PackedArrays(
            {
                "last": (np.int64, (num_seqs,)),
                "integers": (np.int64, (3, num_seqs)),
                "reals": (np.float64, (3, num_seqs)),
            },
            weight.device,
        )
        self._replay: Callable[[], None] | None = None

    def record(self, recorder: Recorder) -> None:
        leave_to_nobody(self._arrays, 0)
        self._arrays.send()
        self._replay = recorder.record(self._run)

    def draft(
        self, rows_SR: torch.Tensor, last_token_ids: Sequence[int], rows: SamplingRows
    ) -> list[list[int]]:
        """Return tokens of all depths, behind each row."""
        assert self._replay is not None
        host, count = self._arrays.host, len(last_token_ids)
        self._arrays.wait()
        host["last"][:count] = last_token_ids
        host["integers"][:, :count] = rows.integers.numpy()
        host["reals"][:, :count] = rows.reals.numpy()
        leave_to_nobody(self._arrays, count)
        self._arrays.send()
        self._rows[:count].copy_(rows_SR)
        self._replay()
        token_ids: list[list[int]] = self._tokens[:count].tolist()
        return token_ids

    def _run(self) -> None:
        heads, path = self._heads, self._arrays.device["last"][:, None]
        for depth in range(self._tokens.shape[1]):
            inputs = heads.inputs(self._rows, path) if isinstance(heads, SequentialHeads) else self._rows
            logits = heads.head(depth, inputs)[:, : self._vocab_size].float()
            sampled = sample_eager(
                logits, adjustable_rows(self._arrays, depth, cuts=self._cuts), self._stream
            )
            chosen = torch.where(sampled.finite, sampled.token_ids, NO_TOKEN)
            self._tokens[:, depth].copy_(chosen)
            # Where there is no token, any will do: the chain has ended.
            path = torch.cat([path, chosen.clamp(min=0)[:, None]], dim=1)
