"""Small made-up forwards, and the same lowered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from specdec.attention.base import LayerAttention
from specdec.attention.metadata import build_metadata
from specdec.attention.native import resolve_cache_dir
from specdec.kv.pool import KvPool
from specdec.model.batch import SequenceSlice
from specdec.model.fusion import fuse
from specdec.model.lowering import LinearLayer, Operation, lower
from specdec.model.native_forward import NativeForward, load_forward_library, load_quantized_kernel
from specdec.model.packed_weights import PackedWeights
from specdec.model.position_tables import position_tables
from specdec.model.quantized_linear import QuantizedWeight
from specdec.model.recording import Recording, record
from specdec.model.schedule import Step, place, schedule
from specdec.model.trace import Trace

VOCAB, WIDTH, NUM_POSITIONS = 50, 48, 40
Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden [1, T, WIDTH], positions [1, T]) -> [1, T, anything]: what stands between embedding and logits."""


@dataclass(frozen=True)
class Model:
    """Embedding, a body, and a choice of rows; no attention."""

    body: Body
    table: torch.Tensor

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        paged: Any,
        incoming: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = self.body(F.embedding(input_ids, self.table), positions)
        return hidden[:, logit_rows][0]


@dataclass(frozen=True)
class Native:
    """The same model, lowered."""

    forward: NativeForward
    steps: list[Step]

    def __call__(self, input_ids: torch.Tensor, start: int, logit_rows: torch.Tensor) -> torch.Tensor:
        count = input_ids.shape[1]
        piece = SequenceSlice(
            token_ids=[0] * count, start=start, block_table=list(range(1, 11)), num_logit_rows=0
        )
        metadata = build_metadata([piece], block_size=4)
        caches = self.forward.bind_caches(
            KvPool([], num_blocks=2, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
        )
        return self.forward.run(input_ids, logit_rows, metadata, caches, metadata.positions)

    def count(self, kind: type[Operation]) -> int:
        return sum(isinstance(step.operation, kind) for step in self.steps)


def lowered(
    model: Model,
    *,
    fused: bool = True,
    max_bytes: int = 1 << 30,
    recordings: tuple[Recording, Recording] | None = None,
) -> Native:
    trace = Trace(*(recordings or record(model)))
    result = lower(trace)
    results = [result.output.value]
    operations = fuse(result.operations, results) if fused else result.operations
    steps = schedule(operations)
    values = {ref.value for operation in operations for ref in operation.inputs}
    tables = position_tables(trace, [v for v in values if v.kind == "position"], NUM_POSITIONS)
    library = load_forward_library(resolve_cache_dir(None))
    layers: list[LayerAttention] = []
    is_quantized = any(
        isinstance(operation, LinearLayer) and isinstance(operation.weight, QuantizedWeight)
        for operation in operations
    )
    forward = NativeForward(
        library,
        steps,
        place(steps, results),
        tables,
        output=result.output,
        weights=PackedWeights(library, max_bytes),
        layers=layers,
        quantized_kernel=load_quantized_kernel(resolve_cache_dir(None)) if is_quantized else None,
    )
    return Native(forward, steps)
