"""From a call of PyTorch code to a native one: it is recorded, lowered, and its weights are packed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from specdec.attention.base import LayerAttention
from specdec.model.compile_work import Libraries
from specdec.model.cut import behind_hidden
from specdec.model.fusion import fuse
from specdec.model.lowering import lower
from specdec.model.native_forward import NativeForward
from specdec.model.packed_weights import PackedWeights, weights_of
from specdec.model.parallel.shared_slots import RankSlots
from specdec.model.position_tables import position_tables
from specdec.model.recording import HiddenOf, ModelCall, record
from specdec.model.schedule import place, schedule
from specdec.model.trace import Domain, Trace

NUM_STAGES = 5
"""Pieces of the work on one call, beside those that pack one weight each."""
CHECK_STAGE = "checking against the eager forward"
"""What has to follow before the result is used."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
_QUANTIZED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""For quantized weights: eager, products (8 bits) or weights (4 bits) are rounded in between."""


def tolerance_of(dtype: torch.dtype, *, is_quantized: bool) -> float:
    """Return the largest `relative_difference` from eager results with which a native form is used."""
    return (_QUANTIZED_TOLERANCE if is_quantized else _TOLERANCE)[dtype]


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference, as a share of the largest number."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """What is run to be recorded, and what its rows are."""

    call: ModelCall
    layers: Sequence[LayerAttention]
    """Attention of the layers that it runs, consecutive ones."""
    num_position_ids: int
    """Position ids are below this."""
    incoming: torch.Tensor | None = None
    """Made-up rows [1, max(NUM_ROWS), width], where it is given some beside token ids."""
    hidden_of: HiddenOf | None = None
    """What it hands out beside its output, right after it."""
    begins_at_hidden: bool = False
    """Whether of it that alone is wanted which follows on `hidden_of`: it is then given that."""
    output: Domain = "logit_rows"
    """Which rows its output has: fp32 logits, one row per logit row, or anything with one row per token."""
    recording: AbstractContextManager[None] = field(default_factory=nullcontext)
    """Entered while it is recorded."""


def compile_call(
    recorded: RecordedCall,
    libraries: Libraries,
    weights: PackedWeights,
    slots: RankSlots | None = None,
    expect_weights: Callable[[int], None] | None = None,
) -> Generator[str, None, NativeForward]:
    """Make the native form of a call; yields the name of each piece of the work before it.

    Args:
        recorded: the call.
        libraries: built already.
        weights: where its linear weights are packed.
        slots: where ranks hand each other rows; None: there are no ranks.
        expect_weights: told how many weights there are, once that is known.

    Raises:
        CannotLower: naming what has no native form.
    """
    yield "recording the forward"
    with recorded.recording:
        recordings = record(recorded.call, recorded.incoming, recorded.hidden_of)
    yield "tracing what depends on what"
    trace = Trace(*recordings)
    yield "lowering operations"
    lowered, incoming = lower(trace, recorded.output), trace.incoming
    if recorded.begins_at_hidden:
        lowered, incoming = behind_hidden(lowered)
    yield "scheduling operations"
    results = [ref.value for ref in (lowered.output, lowered.hidden) if ref is not None]
    operations = fuse(lowered.operations, results)
    steps = schedule(operations)
    buffers = place(steps, results)
    used = {ref.value for operation in operations for ref in operation.inputs}
    yield "tabulating positions"
    of_positions = [value for value in used if value.kind == "position"]
    tables = position_tables(trace, of_positions, recorded.num_position_ids)
    matrices = [weight for operation in operations for weight in weights_of(operation)]
    if expect_weights is not None:
        expect_weights(len(matrices))
    for matrix in matrices:
        weights.pack(matrix)
        yield "packing weights"
    return NativeForward(
        libraries.forward,
        steps,
        buffers,
        tables,
        output=lowered.output,
        hidden=lowered.hidden,
        incoming=incoming,
        weights=weights,
        layers=recorded.layers,
        quantized_kernel=libraries.quantized_kernel,
        slots=slots,
    )
