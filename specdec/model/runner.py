"""Runs a model on flat batches over its own paged KV pool."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import torch

from specdec.attention.base import AttentionBackend, LayerCaches, PagedBatch
from specdec.attention.metadata import AttentionMetadata, build_metadata
from specdec.attention.observation import Observation
from specdec.attention.sdpa import SdpaAttention
from specdec.core.errors import ConfigError
from specdec.core.plan import SlotMove
from specdec.kv.config import CacheConfig
from specdec.kv.hidden_pool import HiddenPool
from specdec.kv.packed_copy import PackedCopy, packed_bytes_per_token
from specdec.kv.pool import FIRST_BLOCK, KvPool
from specdec.model.batch import Generated, NativeChooser, SequenceSlice, logit_rows
from specdec.model.exit_states import ExitTap
from specdec.model.hidden_taps import LayerTaps
from specdec.model.loader import LoadedModel
from specdec.model.pool_sizing import PoolDemand, held_tokens, kv_shapes, make_pool
from specdec.model.position_ids import shifted_positions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs:
    """One flat batch, ready for the model; shapes as in `attention.metadata`."""

    input_ids: torch.Tensor
    """int64 [1, T]"""
    logit_rows: torch.Tensor
    """int64 [L]: rows that yield logits, ascending."""
    metadata: AttentionMetadata
    shifted_positions: torch.Tensor | None = None
    """int64 [T]: position ids that the model is given, where they are not `metadata.positions`."""
    incoming: torch.Tensor | None = None
    """[1, T, hidden_size], in the model's dtype: what comes out of the layers before those that are here."""

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 [T]: what the model is given."""
        return self.metadata.positions if self.shifted_positions is None else self.shifted_positions

    def to(self, device: torch.device) -> ForwardInputs:
        """Return them with their tensors on `device`; themselves when they are there."""
        if self.input_ids.device.type == device.type:
            return self
        shifted = self.shifted_positions
        return ForwardInputs(
            input_ids=self.input_ids.to(device),
            logit_rows=self.logit_rows.to(device),
            metadata=self.metadata.to(device),
            shifted_positions=None if shifted is None else shifted.to(device),
            incoming=self.incoming,
        )


Incoming = Callable[[], torch.Tensor]


class ForwardGraphs(Protocol):
    """A compiled form of the model's forward."""

    @property
    def is_ready(self) -> bool:
        """Whether it is there: before, everything runs eagerly."""
        ...

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """See `TargetDescription.row_buckets`: once it is there."""
        ...

    def try_run(self, inputs: ForwardInputs) -> torch.Tensor | None:
        """Return what `call_model` does, in any floating dtype, or None when this batch must run eagerly.

        It must write the step's K/V into the runner's pool as the eager forward does, and hidden states
        where the runner keeps some (`ModelRunner.keep_hidden`).
        """
        ...

    def try_generate(
        self,
        slices: Sequence[SequenceSlice],
        num_more: Sequence[int],
        chooser: NativeChooser,
        incoming: Incoming | None = None,
        observation: Observation | None = None,
    ) -> Generated | None:
        """See `batch.GeneratingRunner.try_generate`; `observation` is of the first forward.

        `incoming` is called, once, when it is certain that the answer is not None: it returns what
        `ForwardInputs.incoming` would hold.
        """
        ...


class ModelRunner:
    """Implements `model.batch.GeneratingRunner` on a `LoadedModel`.

    The eager forward is always there; `graphs`, once set, is asked first. Not thread-safe: one forward
    at a time, because all share the pool.
    """

    incoming_width: int | None = None
    """Whole models read tokens alone; see `static_batch.StaticModel`."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: CacheConfig,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int = 512,
        reserved_bytes: int = 0,
        max_held_tokens: int | None = None,
        backend: AttentionBackend | None = None,
        hidden_layers: Sequence[int] = (),
        drafts_packed: bool = False,
    ) -> None:
        """Allocate the pool.

        Args:
            loaded: the model; several runners may share it (each has its own pool).
            cache: size of the pool.
            max_num_seqs: sequences that may run at once; the pool is never larger than they can use.
            max_num_batched_tokens: rows of the largest forward, for which memory is left.
            reserved_bytes: memory to leave for what is made later.
            max_held_tokens: tokens of a sequence that have K/V at the same time, at most; None: all.
            backend: attention; None takes the portable one.
            hidden_layers: layers whose hidden states are kept (`hidden_taps` numbers them); all ranks that
                have the last layers are given the same.
            drafts_packed: whether there is to be a copy of the pool in 8 bits, for a view that drafts.

        Raises:
            ConfigError: these hidden states cannot be had.
            ResourceError: the memory does not hold a single block, or not what was asked for.
        """
        self.loaded = loaded
        self.block_size = cache.block_size
        self.backend: AttentionBackend = SdpaAttention() if backend is None else backend
        # Any: transformers' forward is typed too narrowly for keywords that travel to the attention.
        self._model: Any = loaded.model if loaded.invariant is None else loaded.invariant.around(loaded.model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters
        self.taps = LayerTaps(loaded, hidden_layers) if hidden_layers else None
        row_bytes = 0 if self.taps is None else self.taps.width * loaded.dtype.itemsize
        if drafts_packed:
            self._require_packed_reader()
            row_bytes += packed_bytes_per_token(kv_shapes(loaded))
        demand = PoolDemand(
            row_bytes=row_bytes,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            reserved_bytes=reserved_bytes,
            max_held_tokens=max_held_tokens,
        )
        self.pool = make_pool(loaded, cache, demand, self._forward_on)
        self.packed_copy = PackedCopy(self.pool) if drafts_packed else None
        """What a view attends to instead of the pool, where it is to read less."""
        self.caches: LayerCaches = self.pool
        """What this runner attends to."""
        self.hidden: HiddenPool | None = None
        """Hidden states of `hidden_layers`, where there are such, of every slot of the pool."""
        if self.taps is not None:
            self.hidden = HiddenPool(
                self.taps.width,
                num_blocks=self.pool.num_blocks,
                block_size=self.block_size,
                dtype=loaded.dtype,
                device=loaded.device,
            )
            self._forward_on([_one_row()], self.pool)  # what cannot be tapped says so now
        self.exit_tap: ExitTap | None = None
        """Of an early exit whose states are wanted: its last layer."""
        self.graphs: ForwardGraphs | None = None
        self.vocab_size = loaded.vocab_size
        self.num_blocks = self.pool.num_blocks
        capacity = (self.num_blocks - FIRST_BLOCK) * self.block_size
        holds = held_tokens(loaded, max_held_tokens) <= capacity
        self.max_model_len = loaded.max_model_len if holds else min(loaded.max_model_len, capacity)
        if self.max_model_len < loaded.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens: sequences are limited to that instead of the model's %d "
                "(cache.memory_bytes or cache.memory_fraction make it larger)",
                self.max_model_len,
                loaded.max_model_len,
            )

    def of_view(self, view: LoadedModel, exit_tap: ExitTap | None = None) -> ModelRunner:
        """Return a runner of a view of the model (`model.views`) on the pool of this one.

        It reads and writes the same K/V, of the layers that it has, or their packed copy, and keeps no hidden
        states, but those of an `exit_tap` while somebody collects them. The two may run in turn. It runs
        eagerly until it is given `graphs` of its own.
        """
        other = copy.copy(self)
        other.caches = self.packed_copy or self.pool
        other.loaded = view
        other._model = view.model if view.invariant is None else view.invariant.around(view.model)
        other.taps = other.hidden = other.graphs = None
        other.exit_tap = exit_tap
        return other

    @property
    def attends_packed(self) -> bool:
        """Whether it attends to K/V in 8 bits."""
        return self.caches is self.packed_copy

    def forward(
        self, slices: Sequence[SequenceSlice], observation: Observation | None = None
    ) -> torch.Tensor:
        """Run one flat batch; see `model.batch.Runner.forward`. `observation` says what of it is observed."""
        inputs = self.pack(slices)
        if observation is not None:
            inputs = replace(inputs, metadata=replace(inputs.metadata, observation=observation))
        return self.forward_packed(inputs)

    @torch.inference_mode()
    def forward_packed(self, inputs: ForwardInputs) -> torch.Tensor:
        """`forward` of a batch that is laid out already."""
        logits = None if self.graphs is None else self.graphs.try_run(inputs)
        if logits is None:
            logits = self.forward_eager(inputs)
        return logits.float()

    def try_generate(
        self,
        slices: Sequence[SequenceSlice],
        num_more: Sequence[int],
        chooser: NativeChooser,
        observation: Observation | None = None,
    ) -> Generated | None:
        """See `model.batch.GeneratingRunner.try_generate`: None while the forward runs eagerly.

        `observation`, if any, says what of the first forward is observed.
        """
        if self.graphs is None:
            return None
        return self.graphs.try_generate(slices, num_more, chooser, observation=observation)

    @torch.inference_mode()
    def copy_blocks(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """See `model.batch.Runner.copy_blocks`; of a part of a model, its part of K and V."""
        self.pool.copy_blocks(sources, destinations)
        if self.hidden is not None:
            self.hidden.copy_blocks(sources, destinations)

    def keep_hidden(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep hidden states `rows` [T, width] of a forward whose K/V went to `slots`, int64 [T]."""
        assert self.hidden is not None
        self.hidden.write(slots, rows)

    @torch.inference_mode()
    def move_slots(self, moves: Sequence[SlotMove]) -> None:
        """See `model.batch.Runner.move_slots`; of a part of a model, its part of K and V."""
        self.pool.move_slots(moves)
        if self.hidden is not None:
            self.hidden.move_slots(moves)

    def _require_packed_reader(self) -> None:
        if not self.backend.reads_packed:
            raise ConfigError(
                "speculative_config.kv.dtype: int8 does not go with attention backend "
                f"{self.backend.name} yet: leave it out"
            )

    @property
    def kv_generation(self) -> int:
        """See `core.plan.TargetResult.kv_generation`: 0 while the forward runs eagerly, 1 once compiled."""
        return int(self.graphs is not None and self.graphs.is_ready)

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """See `TargetDescription.row_buckets`: those of `graphs`, so none while everything runs eagerly."""
        return () if self.graphs is None else self.graphs.row_buckets

    def pack(self, slices: Sequence[SequenceSlice]) -> ForwardInputs:
        """Lay `slices` out as one flat batch, in host memory: who runs it knows best how to send it on."""
        metadata = build_metadata(slices, block_size=self.block_size)
        return ForwardInputs(
            input_ids=torch.tensor([list(chain.from_iterable(piece.token_ids for piece in slices))]),
            logit_rows=torch.tensor(logit_rows(slices), dtype=torch.int64),
            metadata=metadata,
            shifted_positions=shifted_positions(metadata.positions, slices),
        )

    @torch.inference_mode()
    def _forward_on(self, slices: Sequence[SequenceSlice], pool: KvPool) -> torch.Tensor:
        """Run eagerly on a pool that is not ours."""
        return self.forward_eager(self.pack(slices), pool)

    def forward_eager(self, inputs: ForwardInputs, pool: LayerCaches | None = None) -> torch.Tensor:
        """Run the model's own forward, on our pool unless another is given.

        Returns logits [L, vocab] in the model's dtype, or what comes out of the layers that are here.
        """
        inputs = inputs.to(self.loaded.device)
        metadata = inputs.metadata
        paged = PagedBatch(
            backend=self.backend,
            layers=self.loaded.layers,
            caches=self.caches if pool is None else pool,
            metadata=metadata,
            plan=self.backend.begin(metadata),
        )
        call = self.call_and_keep if pool is None else self.call_model
        return call(inputs.input_ids, inputs.position_ids[None], inputs.logit_rows, paged, inputs.incoming)

    def call_and_keep(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        paged: Any,
        incoming: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`call_model` on our own pool; hidden states are kept where the runner keeps some."""
        output = self.call_model(input_ids, positions, logit_rows, paged, incoming)
        if self.taps is not None:
            self.keep_hidden(paged.metadata.slot_mapping, self.taps.rows)
        return output

    def call_model(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        paged: Any,
        incoming: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the model's own forward with `paged` as what its attention layers call.

        `input_ids` and `positions` are int64 [1, T], `logit_rows` int64 [L], `incoming` is as in
        `ForwardInputs`; returns [L, vocab], or what comes out of the layers that are here. The hidden states
        of the batch are then those of `taps`.
        """
        assert incoming is None, "all layers are here"
        if self.taps is None:
            return self._call(input_ids, positions, logit_rows, paged)
        with self.taps.collecting():
            return self._call(input_ids, positions, logit_rows, paged)

    def _call(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, paged: Any
    ) -> torch.Tensor:
        if self._keeps_logits:
            output = self._model(
                input_ids=input_ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=logit_rows,
                paged=paged,
            )
            logits: torch.Tensor = output.logits[0]
            return logits
        # A head that cannot be told which rows to compute computes them all: right, but not cheap.
        output = self._model(input_ids=input_ids, position_ids=positions, use_cache=False, paged=paged)
        every_row: torch.Tensor = output.logits[0]
        return every_row[logit_rows]


def _one_row() -> SequenceSlice:
    """One token of no sequence, whose K/V go to the scratch block."""
    return SequenceSlice(token_ids=(0,), start=0, block_table=(0,), num_logit_rows=1)
