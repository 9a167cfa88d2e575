"""A flat batch in memory of constant place and size: a forward recorded on it runs on changing batches.

T rows, S = T sequences at most, B blocks of the longest sequence, W units of attention work, M columns of
ancestor masks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.attention.base import LayerAttention, LayerCaches, PagedBatch
from specdec.attention.metadata import AttentionMetadata
from specdec.attention.triton import StaticWork, TritonPagedAttention
from specdec.attention.triton_work import MAX_SPLIT_ROWS, UNIT_SIZE
from specdec.model.runner import ForwardInputs

_ALIGNMENT = 256
"""Bytes; kernels are compiled for aligned addresses."""

Field = tuple[type[np.generic], tuple[int, ...]]


class PackedArrays:
    """Arrays one behind the other in host memory, and their twins on a device, filled by few copies."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        """Lay out zeros."""
        offsets: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        """With what is left free up to the next array."""
        size = 0
        for name, (dtype, shape) in fields.items():
            offsets[name] = size
            size += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
            self._ends[name] = size
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._offsets = offsets
        self.host: dict[str, NDArray[np.generic]] = {}
        self.device: dict[str, torch.Tensor] = {}
        for name, (dtype, shape) in fields.items():
            num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
            part = slice(offsets[name], offsets[name] + num_bytes)
            self.host[name] = self._host[part].numpy().view(dtype).reshape(shape)
            torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
            self.device[name] = self._device[part].view(torch_dtype).view(shape)

    def wait(self) -> None:
        """Return once the host arrays may be written again."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, **num_rows: int) -> None:
        """Copy all arrays to the device: of those named, in their order here, so many of their first rows."""
        begin = 0
        for name, count in num_rows.items():
            self._copy(begin, self._offsets[name] + count * self.host[name][0].nbytes)
            begin = self._ends[name]
        self._copy(begin, self._host.shape[0])
        if self._sent is not None:
            self._sent.record()

    def _copy(self, begin: int, end: int) -> None:
        if begin < end:
            self._device[begin:end].copy_(self._host[begin:end], non_blocking=True)


class StaticLayers(Protocol):
    """What is known of layers that a forward runs."""

    @property
    def path(self) -> Path: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def layers(self) -> Sequence[LayerAttention]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


class StaticModel(Protocol):
    """What a forward is recorded of: a `ModelRunner`, or what runs a drafter."""

    @property
    def loaded(self) -> StaticLayers: ...
    @property
    def caches(self) -> LayerCaches: ...
    @property
    def block_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def incoming_width(self) -> int | None:
        """Numbers that each row brings along beside its token (`ForwardInputs.incoming`); None: none."""
        ...

    def call_model(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        paged: Any,
        incoming: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the forward, as `ModelRunner.call_model` does.

        Without `incoming`, what needs some goes on behind the rows that logits were wanted of before.
        """
        ...

    def call_and_keep(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        paged: Any,
        incoming: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `call_model`; what is kept of each row beside K/V is kept."""
        ...


class StaticBatch:
    """At most `num_rows` rows, and what the model's forward needs to run on them."""

    def __init__(
        self,
        runner: StaticModel,
        backend: TritonPagedAttention,
        num_rows: int,
        num_logits: int,
        *,
        takes_trees: bool = False,
    ) -> None:
        """Take the memory.

        Args:
            runner: whose model and cache it is.
            backend: the attention of that runner.
            num_rows: T; rows and sequences.
            num_logits: rows of logits.
            takes_trees: whether sequences may be trees; chains are then read with masks, too.

        Raises:
            TritonUnavailable: the model's layers differ in their heads.
        """
        loaded = runner.loaded
        self._runner = runner
        self._backend = backend
        self.num_rows = num_rows
        self._size = size = backend.static_size(loaded.layers, loaded.dtype, num_rows)
        table_width = -(-runner.max_model_len // runner.block_size)
        self._takes_trees = takes_trees
        self._incoming = None
        if runner.incoming_width is not None:
            shape = (num_rows, runner.incoming_width)
            self._incoming = torch.zeros(shape, dtype=loaded.dtype, device=loaded.device)
        of_trees: dict[str, Field] = {}
        if takes_trees:
            of_trees["masks"] = (np.bool_, (num_rows, min(num_rows, MAX_SPLIT_ROWS)))
            of_trees["is_tree"] = (np.bool_, (num_rows,))
        self._arrays = arrays = PackedArrays(
            {
                "input_ids": (np.int64, (num_rows,)),
                "positions": (np.int64, (num_rows,)),
                "depths": (np.int64, (num_rows,)),
                "slots": (np.int64, (num_rows,)),
                "logit_rows": (np.int64, (num_logits,)),
                "query_start": (np.int32, (num_rows + 1,)),
                "context_lens": (np.int32, (num_rows,)),
                "row_sequences": (np.int32, (num_rows,)),
                "count": (np.int32, (1,)),
                "units": (np.int32, (size.num_units, UNIT_SIZE)),
                "places": (np.int32, (num_rows, 2)),
                **of_trees,
                "block_tables": (np.int32, (num_rows, table_width)),
            },
            loaded.device,
        )
        device = arrays.device
        self.block_tables = device["block_tables"]
        metadata = static_metadata(
            runner,
            query_start=device["query_start"],
            context_lens=device["context_lens"],
            block_tables=self.block_tables,
            slot_mapping=device["slots"],
            positions=device["depths"],
            ancestor_mask=device.get("masks"),
            is_tree=device.get("is_tree"),
        )
        work = StaticWork(
            metadata=metadata,
            units=device["units"],
            count=device["count"],
            places=device["places"],
            num_partials=size.num_partials,
            row_sequences=device["row_sequences"],
        )
        self._paged = paged_batch(runner, backend, work)

    def holds(self, inputs: ForwardInputs) -> bool:
        """Whether the batch fits: rows, logits, work of the attention; trees only where it takes them."""
        metadata = inputs.metadata
        return (
            (self._takes_trees or metadata.ancestor_mask is None)
            and metadata.observation is None
            and metadata.num_rows <= self.num_rows
            and inputs.logit_rows.shape[0] <= self._arrays.host["logit_rows"].shape[0]
            and self._backend.holds(self._size, metadata.query_lens_host, metadata.context_lens_host)
        )

    def fill(self, inputs: ForwardInputs) -> None:
        """Put a batch that it holds, in host memory and without padding, where the forward reads it."""
        metadata, host = inputs.metadata, self._arrays.host
        rows, sequences = metadata.num_rows, metadata.num_sequences
        units, places = self._backend.static_work(
            self._size, metadata.query_lens_host, metadata.context_lens_host
        )
        self._arrays.wait()
        for name, tensor in (
            ("input_ids", inputs.input_ids[0]),
            ("positions", inputs.position_ids),
            ("depths", metadata.positions),  # only the attention of trees looks at them
            ("slots", metadata.slot_mapping),
            ("logit_rows", inputs.logit_rows),
            ("context_lens", metadata.context_lens),
        ):
            host[name][: len(tensor)] = tensor.numpy()
            host[name][len(tensor) :] = 0
        host["query_start"][: sequences + 1] = metadata.query_start.numpy()
        host["query_start"][sequences + 1 :] = rows
        host["row_sequences"][:rows] = np.repeat(
            np.arange(sequences, dtype=np.int32), metadata.query_lens_host
        )
        host["row_sequences"][rows:] = -1
        host["count"][0] = len(units)
        host["units"][: len(units)] = units
        host["places"][:sequences] = places
        width = metadata.block_tables.shape[1]
        host["block_tables"][:sequences, :width] = metadata.block_tables.numpy()
        counts = {"units": len(units), "block_tables": sequences}
        if self._takes_trees:
            self._fill_masks(metadata)
            counts = {"units": len(units), "masks": rows, "block_tables": sequences}
        self._arrays.send(**counts)
        if self._incoming is not None:
            assert inputs.incoming is not None
            self._incoming[:rows].copy_(inputs.incoming[0])

    def _fill_masks(self, metadata: AttentionMetadata) -> None:
        """Put what is a tree, and ancestor masks, those of chains too, where the forward reads them."""
        rows, masks, is_tree = metadata.num_rows, self._arrays.host["masks"], self._arrays.host["is_tree"]
        is_tree[:] = False
        if metadata.is_tree is not None:
            is_tree[: metadata.num_sequences] = metadata.is_tree.numpy()
        if metadata.ancestor_mask is not None:
            width = metadata.max_query_len
            masks[:rows, :width] = metadata.ancestor_mask.numpy()
            masks[:rows, width:] = False
            return
        lens = metadata.query_lens_host
        row_in_sequence = np.arange(rows) - np.repeat(metadata.query_start.numpy()[: len(lens)], lens)
        np.less_equal(np.arange(masks.shape[1]), row_in_sequence[:, None], out=masks[:rows])

    def forward(self) -> torch.Tensor:
        """Run the model; logits [num_logits, vocab], of which those of the filled rows mean something.

        Hidden states are kept where the runner keeps some: those of the rows beyond, in the scratch block.
        """
        device = self._arrays.device
        return self._runner.call_and_keep(
            device["input_ids"][None],
            device["positions"][None],
            device["logit_rows"],
            self._paged,
            None if self._incoming is None else self._incoming[None],
        )


def static_metadata(
    runner: StaticModel,
    *,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    ancestor_mask: torch.Tensor | None = None,
    is_tree: torch.Tensor | None = None,
) -> AttentionMetadata:
    """Return metadata of which nothing is known on the host."""
    return AttentionMetadata(
        query_start=query_start,
        context_lens=context_lens,
        block_tables=block_tables,
        slot_mapping=slot_mapping,
        positions=positions,
        ancestor_mask=ancestor_mask,
        is_tree=is_tree,
        query_lens_host=(),
        context_lens_host=(),
        block_size=runner.block_size,
        max_query_len=slot_mapping.shape[0],
        max_context_len=runner.max_model_len,
    )


def paged_batch(runner: StaticModel, backend: TritonPagedAttention, work: StaticWork) -> PagedBatch:
    """Return what the runner's attention layers are handed for a batch whose work is in `work`."""
    loaded = runner.loaded
    return PagedBatch(
        backend=backend,
        layers=loaded.layers,
        caches=runner.caches,
        metadata=work.metadata,
        plan=backend.static_plan(loaded.layers, loaded.dtype, work),
    )
