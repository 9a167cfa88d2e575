"""The whole draft loop as CUDA graphs: a launch per forward and choice, none of which waits for the host.

S sequences that draft, k draft tokens each, B blocks of the longest sequence, W units of attention work, V
token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from specdec.attention.triton import MAX_PARTIAL_BYTES, StaticWork, TritonPagedAttention
from specdec.attention.triton_work import UNIT_SIZE
from specdec.core.proposal import NoiseStream
from specdec.model.batch import NO_TOKEN
from specdec.model.config import CompileConfig
from specdec.model.cuda_graphs import GraphRecording, RecordedModel, recordable
from specdec.model.graph_recorder import CudaRecorder, Recorder
from specdec.model.row_buckets import sequence_buckets, smallest_holding
from specdec.model.runner import ForwardInputs
from specdec.model.static_batch import (
    PackedArrays,
    StaticBatch,
    StaticLayers,
    StaticModel,
    paged_batch,
    static_metadata,
)
from specdec.proposers.draft_loop import ChainStart
from specdec.sampling.rows import KEEP_ALL_TOP_K, RowSpec, SamplingRows
from specdec.sampling.sampler import sample_eager

Place = Callable[[ChainStart], ChainStart | None]
MAX_TOP_K = 128
"""Larger ones are drafted step by step."""
MAX_CATCH_UP = 2
"""Rows per sequence in the first forward: what a fully accepted draft leaves a draft model to read."""


BYTES_PER_SCORE = 40
"""While tokens are chosen with cuts: logits, scores, noise, sorted values, their places, masses in fp64."""


def loop_bytes(loaded: StaticLayers, config: CompileConfig, max_num_seqs: int) -> int:
    """Return about how much memory recorded loops are going to take beside the model and its graphs."""
    if config.mode == "off" or loaded.device.type != "cuda":
        return 0
    num_seqs = min(max_num_seqs, config.cuda_graph_max_rows)
    return num_seqs * loaded.vocab_size * BYTES_PER_SCORE + MAX_PARTIAL_BYTES


class GraphSize(NamedTuple):
    """What a recorded chain is for."""

    num_seqs: int
    """Most sequences."""
    cuts: bool
    """With top-k, top-p and min-p, which sort the vocabulary."""


class GraphedDraftLoop(GraphRecording):
    """Implements `FusedDraftLoop` on a GPU.

    Prompts, shaped logits, and chains in which the shift of position ids ends are left to the other one.
    """

    def __init__(
        self,
        runner: RecordedModel,
        config: CompileConfig,
        *,
        vocab_size: int,
        num_draft_tokens: int,
        max_num_seqs: int,
        max_read: int = MAX_CATCH_UP,
        stream: NoiseStream = "target",
        place: Place = lambda start: start,
        recorder: Recorder | None = None,
    ) -> None:
        """Prepare; nothing is recorded yet.

        Args:
            runner: one on a CUDA device with the Triton attention; with any other every answer is None.
            config: whether to record.
            vocab_size: tokens from here on are never chosen.
            num_draft_tokens: largest k; of fewer tokens no more forwards are run.
            max_num_seqs: most sequences that draft at once.
            max_read: most tokens per sequence to read before the first draft token.
            stream: noise that the tokens are chosen with.
            place: where a start lies for `runner`, whose cache may not have every token; None: it cannot be
                drafted here.
            recorder: None takes CUDA's own.
        """
        self._vocab_size = min(vocab_size, runner.vocab_size)
        self._num_draft_tokens = num_draft_tokens
        self._stream: NoiseStream = stream
        self._recorder = recorder
        self._place = place
        self._model = runner
        self._max_read = max_read
        self._chains: dict[GraphSize, _ChainGraph] = {}
        self._ready_sizes: tuple[int, ...] = ()
        self._planned: list[GraphSize] = []
        if (backend := recordable(runner, config)) is not None and config.cuda_graph_max_rows:
            self._backend = backend
            most = min(max_num_seqs, config.cuda_graph_max_rows // max_read)
            sizes = sequence_buckets(most) if most else ()
            self._planned = [GraphSize(size, cuts) for size in reversed(sizes) for cuts in (False, True)]
        super().__init__(runner.loaded.path.name, len(self._planned))

    def try_draft(self, starts: Sequence[ChainStart]) -> list[list[int]] | None:
        """See `FusedDraftLoop`; None until graphs that hold the batch are recorded.

        More sequences than the largest graph holds (branches, say) are drafted in several launches. When one
        of them is refused, what the others did is done again by whoever is asked next, to the same effect.
        """
        most = self._ready_sizes[-1] if self._ready_sizes else 0
        if not 0 < most < len(starts):
            return self._try_at_once(starts)
        chains: list[list[int]] = []
        for first in range(0, len(starts), most):
            piece = self._try_at_once(starts[first : first + most])
            if piece is None:
                return None
            chains += piece
        return chains

    def _try_at_once(self, starts: Sequence[ChainStart]) -> list[list[int]] | None:
        drafting = [start for start in starts if start.budget > 0]
        most = max((start.budget for start in drafting), default=0)
        if not 0 < most <= self._num_draft_tokens:
            return None
        if any(start.changes_logits or not _has_one_offset(start) for start in starts):
            return None
        # Tokens are chosen by where they stand in the text, wherever their K/V lie.
        rows = SamplingRows.build([RowSpec(start.params, start.seed, start.end, 1) for start in drafting])
        if rows.largest_top_k > MAX_TOP_K:
            return None
        cuts = bool(rows.largest_top_k or rows.has_top_p or rows.has_min_p)
        # Sequences that only read take room as well, though no token is drafted for them.
        num_seqs = smallest_holding(self._ready_sizes, len(starts))
        chain = None if num_seqs is None else self._chains.get(GraphSize(num_seqs, cuts))
        if chain is None:
            return None
        placed = [one for one in map(self._place, starts) if one is not None]
        if len(placed) < len(starts):
            return None
        inputs = self._model.pack([start.first_slice() for start in placed])
        drafting = [start for start in placed if start.budget > 0]
        if not (chain.first.holds(inputs) and chain.holds(drafting)):
            return None
        drafted = iter(chain.draft(inputs, drafting, rows))
        return [until_end(next(drafted)[: start.budget]) if start.budget > 0 else [] for start in starts]

    def _record_all(self) -> Iterator[None]:
        device = self._model.loaded.device
        recorder = CudaRecorder(device) if self._recorder is None else self._recorder
        for size in self._planned:
            with torch.inference_mode():
                chain = _ChainGraph(
                    self._model, self._backend, size, self._num_draft_tokens, self._max_read, self._stream
                )
                chain.record(self._vocab_size, recorder)
            self._chains[size] = chain
            self._ready_sizes = tuple(sorted({one.num_seqs for one in self._chains}))
            yield

    def _forget(self) -> None:
        self._chains.clear()
        self._ready_sizes = ()


def until_end(chain: list[int]) -> list[int]:
    """Return a chain up to logits that were not finite."""
    return chain[: chain.index(NO_TOKEN)] if NO_TOKEN in chain else chain


def leave_to_nobody(arrays: PackedArrays, first: int) -> None:
    """Let the sequences from `first` on choose greedily, which is quick."""
    arrays.host["integers"][:, first:] = np.array([[0], [0], [KEEP_ALL_TOP_K]])
    arrays.host["reals"][:, first:] = np.array([[0.0], [1.0], [-np.inf]])


def adjustable_rows(arrays: PackedArrays, step: torch.Tensor | int, *, cuts: bool) -> SamplingRows:
    """Return how tokens are chosen, as the arrays say when it is run, so many `step`s further on."""
    seeds, positions, top_k = arrays.device["integers"]
    return SamplingRows(
        integers=torch.stack((seeds, positions + step, top_k)),
        reals=arrays.device["reals"],
        has_greedy=True,
        has_sampled=True,
        largest_top_k=MAX_TOP_K if cuts else 0,
        has_top_p=cuts,
        has_min_p=cuts,
    )


def _contexts(starts: Sequence[ChainStart]) -> list[int]:
    """Return the tokens of each sequence that are attended to when its last draft token is chosen."""
    return [start.end - start.num_dropped + start.budget - 1 for start in starts]


def _has_one_offset(start: ChainStart) -> bool:
    """Whether all drafted tokens have position ids at the same distance from their places."""
    return start.shift is None or not start.end < start.shift.end < start.end + start.budget - 1


def _offset(start: ChainStart) -> int:
    """Return how much the position ids of drafted tokens are above their places in the block table."""
    is_shifted = start.shift is not None and start.end < start.shift.end
    return start.num_dropped + (start.shift.offset if is_shifted and start.shift is not None else 0)


class _ChainGraph:
    """The loop for at most so many sequences."""

    def __init__(
        self,
        runner: StaticModel,
        backend: TritonPagedAttention,
        size: GraphSize,
        num_tokens: int,
        max_read: int,
        stream: NoiseStream,
    ) -> None:
        loaded = runner.loaded
        self._runner, self._backend = runner, backend
        self._cuts, self._num_tokens = size.cuts, num_tokens
        self._stream: NoiseStream = stream
        num_seqs = self._num_seqs = size.num_seqs
        self.first = StaticBatch(runner, backend, max_read * num_seqs, num_seqs)
        self._size = backend.static_size(loaded.layers, loaded.dtype, num_seqs)
        table_width = -(-runner.max_model_len // runner.block_size)
        self._arrays = PackedArrays(
            {
                "ends": (np.int64, (num_seqs,)),
                "offsets": (np.int64, (num_seqs,)),
                "limits": (np.int64, (num_seqs,)),
                "integers": (np.int64, (3, num_seqs)),
                "reals": (np.float64, (3, num_seqs)),
                "count": (np.int32, (1,)),
                "units": (np.int32, (self._size.num_units, UNIT_SIZE)),
                "places": (np.int32, (num_seqs, 2)),
                "block_tables": (np.int32, (num_seqs, table_width)),
            },
            loaded.device,
        )
        integers = partial(torch.zeros, dtype=torch.int64, device=loaded.device)
        self._tokens = integers((num_seqs, num_tokens))
        self._last = integers((num_seqs,))
        """What was chosen in the step before."""
        self._step = integers((1,))
        self._rows = torch.arange(num_seqs + 1, dtype=torch.int32, device=loaded.device)
        self._replay_first: Callable[[], None] | None = None
        self._replay_next: Callable[[], None] | None = None

    def holds(self, starts: Sequence[ChainStart]) -> bool:
        """Whether there is room for the attention of these chains."""
        return self._backend.holds(self._size, [1] * len(starts), _contexts(starts))

    def record(self, vocab_size: int, recorder: Recorder) -> None:
        """Record the loop while nobody drafts: all that it writes goes to the scratch block."""
        self._leave_to_nobody(0)
        self._arrays.send()
        self._replay_first = recorder.record(lambda: self._run_first(vocab_size))
        if self._num_tokens > 1:
            self._replay_next = recorder.record(lambda: self._run_next(vocab_size))

    @torch.inference_mode()
    def draft(
        self, inputs: ForwardInputs, starts: Sequence[ChainStart], rows: SamplingRows
    ) -> list[list[int]]:
        """Return tokens of each start up to the largest budget; those beyond its own mean nothing."""
        assert self._replay_first is not None
        self._fill(starts, rows)
        self.first.fill(inputs)
        self._replay_first()
        num_tokens = max(start.budget for start in starts)
        for _ in range(num_tokens - 1):
            assert self._replay_next is not None
            self._replay_next()
        token_ids: list[list[int]] = self._tokens[: len(starts), :num_tokens].tolist()
        return token_ids

    def _fill(self, starts: Sequence[ChainStart], rows: SamplingRows) -> None:
        host, count = self._arrays.host, len(starts)
        contexts = _contexts(starts)
        units, places = self._backend.static_work(self._size, [1] * count, contexts)
        self._arrays.wait()
        host["ends"][:count] = [start.end - start.num_dropped for start in starts]
        host["offsets"][:count] = [_offset(start) for start in starts]
        host["limits"][:count] = contexts
        host["integers"][:, :count] = rows.integers.numpy()
        host["reals"][:, :count] = rows.reals.numpy()
        self._leave_to_nobody(count)
        host["count"][0] = len(units)
        host["units"][: len(units)] = units
        host["places"][:count] = places
        for table, start, context in zip(host["block_tables"], starts, contexts, strict=False):
            num_blocks = -(-context // self._runner.block_size)
            table[:num_blocks] = start.block_table[:num_blocks]
        self._arrays.send(units=len(units), block_tables=count)

    def _leave_to_nobody(self, first: int) -> None:
        """Let the sequences from `first` on draft nothing, greedily."""
        host = self._arrays.host
        for name in ("ends", "offsets", "limits"):
            host[name][first:] = 0
        leave_to_nobody(self._arrays, first)

    def _run_first(self, vocab_size: int) -> None:
        self._step.zero_()
        self._choose(self.first.forward()[:, :vocab_size].float())

    def _run_next(self, vocab_size: int) -> None:
        self._choose(self._forward()[:, :vocab_size].float())

    def _choose(self, logits_SV: torch.Tensor) -> None:
        rows = adjustable_rows(self._arrays, self._step, cuts=self._cuts)
        sampled = sample_eager(logits_SV, rows, self._stream)
        self._last.copy_(torch.where(sampled.finite, sampled.token_ids, NO_TOKEN))
        # More steps than there are tokens are run while recording.
        column = self._step.clamp(max=self._num_tokens - 1)
        self._tokens.index_copy_(1, column, self._last[:, None])
        self._step.add_(1)

    def _forward(self) -> torch.Tensor:
        """Read the tokens of the step before; those that are over budget go to the scratch block, unseen."""
        device, runner = self._arrays.device, self._runner
        tables, block_size = device["block_tables"], runner.block_size
        places = device["ends"] + (self._step - 1)
        lives = places < device["limits"]
        places = torch.where(lives, places, 0)
        blocks = tables.gather(1, (places // block_size)[:, None])[:, 0].long()
        metadata = static_metadata(
            runner,
            query_start=self._rows,
            context_lens=torch.where(lives, places + 1, 0).int(),
            block_tables=tables,
            slot_mapping=torch.where(lives, blocks * block_size + places % block_size, 0),
            positions=places,
        )
        work = StaticWork(
            metadata=metadata,
            units=device["units"],
            count=device["count"],
            places=device["places"],
            num_partials=self._size.num_partials,
            row_sequences=self._rows[:-1],
        )
        # Where there was no token, any will do: the chain has ended.
        input_ids = self._last.clamp(min=0)
        paged = paged_batch(runner, self._backend, work)
        position_ids = torch.where(lives, places + device["offsets"], 0)
        return runner.call_model(input_ids[None], position_ids[None], self._rows[:-1].long(), paged)
