"""Runs one stage of a pipeline on flat batches, in parts that keep all stages at work.

Stage s runs part i while stage s + 1 runs part i - 1. A round is over before the next begins, so that rows
are computed as in one process: in the order of positions, over the same K/V.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from specdec.attention.base import AttentionBackend
from specdec.attention.observation import Observation
from specdec.kv.config import CacheConfig
from specdec.kv.pool import KvPool
from specdec.model.batch import Generated, NativeChooser, SequenceSlice
from specdec.model.loader import LoadedModel
from specdec.model.parallel.group import Transfer
from specdec.model.runner import ForwardInputs, ModelRunner

_GPU_MICRO_BATCH_TOKENS = 256
_CPU_MICRO_BATCH_TOKENS = 32
"""About where a product with a matrix begins to cost more than reading the matrix."""
_PARTS_PER_STAGE = 4
"""At most: while the first and the last parts run stages are idle, with so many a fifth of the round."""
_CRUMBS_PER_PART = 4
"""A chain is not cut into pieces smaller than this share of a part: chains of draft tokens stay whole."""


class StageRunner(ModelRunner):
    """Implements `model.batch.Runner` on one stage; all stages call `forward` with the same slices.

    Logits come out of the last stage, the others return none.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: CacheConfig,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int = 512,
        reserved_bytes: int = 0,
        backend: AttentionBackend | None = None,
        hidden_layers: Sequence[int] = (),
        micro_batch_tokens: int | None = None,
    ) -> None:
        """Allocate the pool of this stage's layers; see `ModelRunner`.

        `micro_batch_tokens` is `ModelConfig.pipeline_micro_batch_tokens`.
        """
        assert loaded.stage is not None
        self._stage = loaded.stage
        super().__init__(
            loaded,
            cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            reserved_bytes=reserved_bytes,
            backend=backend,
            hidden_layers=hidden_layers if loaded.stage.is_last else (),
        )
        self._max_parts = _PARTS_PER_STAGE * self._stage.plan.num_stages
        self._min_tokens = micro_batch_tokens or (
            _GPU_MICRO_BATCH_TOKENS if loaded.device.type == "cuda" else _CPU_MICRO_BATCH_TOKENS
        )

    @torch.inference_mode()
    def forward(
        self, slices: Sequence[SequenceSlice], observation: Observation | None = None
    ) -> torch.Tensor:
        """Run one flat batch, of which nothing is observed, through this stage.

        Raises:
            TransportError: a rank is gone.
        """
        assert observation is None, "what stages attend to is not put together"
        loaded, stage = self.loaded, self._stage
        batches = micro_batches(slices, limit=self._max_parts, min_tokens=self._min_tokens)
        arrivals = [
            stage.expect(_num_tokens(batch), tag, loaded.dtype, loaded.device)
            for tag, batch in enumerate(batches)
        ]
        rows: list[torch.Tensor] = []
        departures: list[Transfer] = []
        for tag, (batch, arrival) in enumerate(zip(batches, arrivals, strict=True)):
            inputs = self.pack(batch)
            if arrival is not None:
                inputs = replace(inputs, incoming=arrival.finish())
            output = self._run_stage(inputs)
            if len(batches) > 1 and self.kv_generation:
                output = output.clone()  # the compiled forward's own memory, which the next part needs
            if stage.is_last:
                rows.append(output)
            else:
                departures.append(stage.hand_on(output, tag))
        for departure in departures:
            departure.finish()
        if not stage.is_last:
            return torch.empty((0, self.vocab_size), device=loaded.device)
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).float()

    def try_generate(
        self,
        slices: Sequence[SequenceSlice],
        num_more: Sequence[int],
        chooser: NativeChooser,
        observation: Observation | None = None,
    ) -> Generated | None:
        """See `model.batch.GeneratingRunner.try_generate`: None too for rounds of several parts.

        And for trees that were read in part: other stages would have to know.

        Raises:
            TransportError: a rank is gone.
        """
        assert observation is None, "what stages attend to is not put together"
        loaded, stage = self.loaded, self._stage
        if self.graphs is None or not stage.is_last or any(num_more):
            return None
        if any(piece.num_known for piece in slices):
            return None
        if len(micro_batches(slices, limit=self._max_parts, min_tokens=self._min_tokens)) > 1:
            return None

        def arrive() -> torch.Tensor:
            arrival = stage.expect(_num_tokens(slices), 0, loaded.dtype, loaded.device)
            assert arrival is not None, "the last stage is not the first"
            return arrival.finish()

        return self.graphs.try_generate(slices, num_more, chooser, arrive)

    def call_model(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        paged: Any,
        incoming: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run this stage's layers, on what comes out of the stage before; see `ModelRunner.call_model`.

        Returns logits [L, vocab] in the last stage, else hidden states [1, T, hidden_size].
        """
        whole = super().call_model
        return self._stage.run(lambda: whole(input_ids, positions, logit_rows, paged), incoming)

    @torch.inference_mode()
    def _forward_on(self, slices: Sequence[SequenceSlice], pool: KvPool) -> torch.Tensor:
        """Run this stage alone, on made-up hidden states."""
        loaded, stage = self.loaded, self._stage
        inputs = self.pack(slices)
        if not stage.is_first:
            shape = (1, _num_tokens(slices), stage.plan.hidden_size)
            inputs = replace(inputs, incoming=torch.ones(shape, dtype=loaded.dtype, device=loaded.device))
        return self.forward_eager(inputs, pool)

    def _run_stage(self, inputs: ForwardInputs) -> torch.Tensor:
        output = None if self.graphs is None else self.graphs.try_run(inputs)
        return self.forward_eager(inputs) if output is None else output


def _num_tokens(batch: Sequence[SequenceSlice]) -> int:
    return sum(len(piece.token_ids) for piece in batch)


def micro_batches(
    slices: Sequence[SequenceSlice], *, limit: int, min_tokens: int
) -> list[list[SequenceSlice]]:
    """Divide a batch into at most `limit` parts of about as many tokens, and of at least `min_tokens`.

    The order of tokens is kept. A long chain may be divided too: its rows see what rows before them have
    written. Every stage gets the same result.
    """
    left = _num_tokens(slices)
    num_parts = max(1, min(limit, left // min_tokens))
    parts: list[list[SequenceSlice]] = [[]]
    size, wanted = 0, -(-left // num_parts)
    queue = deque(slices)
    while queue:
        piece = queue.popleft()
        if len(parts) < num_parts and left - (wanted - size) >= min_tokens:
            piece, rest = _divided(piece, wanted - size, min_tokens)
            if rest is not None:
                queue.appendleft(rest)
        parts[-1].append(piece)
        size += len(piece.token_ids)
        left -= len(piece.token_ids)
        if size >= wanted and left >= min_tokens and len(parts) < num_parts:
            wanted = max(min_tokens, -(-left // (num_parts - len(parts))))
            size = 0
            parts.append([])
    return parts


def _divided(piece: SequenceSlice, room: int, min_tokens: int) -> tuple[SequenceSlice, SequenceSlice | None]:
    """Cut a chain that is longer than `room`, unless one of both parts would be a crumb."""
    num_behind = len(piece.token_ids) - room
    if piece.parents is not None or min(room, num_behind) < max(1, min_tokens // _CRUMBS_PER_PART):
        return piece, None
    num_rows_behind = min(piece.num_logit_rows, num_behind)
    head = replace(
        piece, token_ids=piece.token_ids[:room], num_logit_rows=piece.num_logit_rows - num_rows_behind
    )
    tail = replace(
        piece, token_ids=piece.token_ids[room:], start=piece.start + room, num_logit_rows=num_rows_behind
    )
    return head, tail
