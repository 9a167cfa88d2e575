"""What makes a model fast on its device: its attention, and another form of its forward."""

from __future__ import annotations

import logging
from typing import Protocol

from specdec.attention.base import AttentionBackend
from specdec.attention.config import AttentionName
from specdec.attention.registry import choose_backend
from specdec.core.idle_work import IdleWork
from specdec.model.config import CompileConfig
from specdec.model.cuda_graphs import CudaForward, can_be_recorded, recordable, recording_bytes
from specdec.model.fused_norms import fuse_norms
from specdec.model.fused_rotary import fuse_rotary
from specdec.model.graphs import CompiledForward, can_stay_compiled, packed_weight_bytes
from specdec.model.loader import LoadedModel
from specdec.model.packed_weights import PackedWeights
from specdec.model.runner import ForwardGraphs, ModelRunner

logger = logging.getLogger(__name__)


def attention_of(loaded: LoadedModel, name: AttentionName, config: CompileConfig) -> AttentionBackend:
    """Return the attention that a configuration names, for a loaded model.

    Raises:
        ConfigError, ResourceError: it, or something batch-invariant, was asked for and cannot be used here.
    """
    return choose_backend(
        name,
        device=loaded.device,
        dtype=loaded.dtype,
        layers=loaded.layers,
        max_context=loaded.max_model_len,
        batch_invariant=loaded.invariant is not None,
        cache_dir=config.cache_dir,
    )


def later_bytes(loaded: LoadedModel, config: CompileConfig, backend: AttentionBackend) -> int:
    """Return about how much memory `accelerate` is going to take beside the model and its cache."""
    if loaded.device.type == "cuda":
        return recording_bytes(loaded, config) if can_be_recorded(backend) else 0
    return packed_weight_bytes(loaded, config)


class Acceleration(ForwardGraphs, IdleWork, Protocol):
    """What makes a runner faster once its work is done."""


def accelerate(
    runner: ModelRunner,
    config: CompileConfig,
    like: Acceleration | None = None,
    *,
    takes_trees: bool = False,
) -> Acceleration:
    """Give the runner the form of its forward that suits its device; it is made while idle.

    `like` is what another runner was given that has the same weights, in part at least; `takes_trees`:
    whether rows of a sequence may be a tree.

    A batch-invariant one on a CPU is made here and now: eager and compiled forwards round differently, and a
    request must not see both.
    """
    made: Acceleration
    if runner.loaded.device.type == "cuda":
        if recordable(runner, config) is not None:
            fuse_norms(runner.loaded.model)
            fuse_rotary(runner.loaded.model)
        elif config.mode == "auto" and config.cuda_graph_max_rows > 0:
            logger.warning(
                "%s runs eagerly, without CUDA graphs, which is slower where batches are small: steps with "
                "attention_backend %s cannot be recorded",
                runner.loaded.path.name,
                runner.backend.name,
            )
        made = CudaForward(runner, config, takes_trees=takes_trees)
    else:
        shared = like if isinstance(like, CompiledForward) else None
        made = compiled = CompiledForward(runner, config, like=shared)
        if runner.loaded.invariant is not None:
            _compile_now(compiled, runner.loaded)
    runner.graphs = made
    settle(runner, config)
    return made


def packed_by(made: Acceleration) -> PackedWeights | None:
    """Return what has been packed for it by now, for others with the same weights."""
    return made.packed_weights if isinstance(made, CompiledForward) else None


def _compile_now(compiled: CompiledForward, loaded: LoadedModel) -> None:
    if not can_stay_compiled(loaded):
        compiled.give_up("batch_invariant, and its rotary embedding has no table for the longest prompts")
    compiled.warm_up()


def settle(runner: ModelRunner, config: CompileConfig) -> None:
    """Let a batch-invariant forward that is going to stay eager take memory to be faster."""
    invariant = runner.loaded.invariant
    if invariant is not None and not (runner.graphs is not None and runner.graphs.is_ready):
        invariant.operations.prepare(config.max_frozen_bytes)
