"""Other weights for a draft model that runs: staged beside it by any thread, taken between two forwards.

Only numbers change: neither shapes, nor what was recorded of the forward, nor the K/V in the pool. Staging
does all that takes time (moving to the device, packing for the compiled forward); taking exchanges pointers
on a CPU, and copies within the device where graphs hold addresses. Only a model that drafts may take them: a
target's tokens would change in the middle of a text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from specdec.core.errors import CheckpointError
from specdec.model.graphs import CompiledForward
from specdec.model.native_forward import StagedForward
from specdec.model.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """Weights as one model wants them, not in use yet."""

    parameters: Mapping[str, torch.Tensor]
    forward: StagedForward | None
    """For the compiled forward, where there was one on a CPU."""


@runtime_checkable
class TakesWeights(Protocol):
    """A proposer whose model may be given other weights while it drafts."""

    def stage_weights(self, weights: Mapping[str, torch.Tensor]) -> StagedWeights:
        """Prepare weights by the names that they have in the model's folder; any thread.

        Raises:
            CheckpointError: they are not those of this model, or this model cannot be given others.
        """
        ...

    def take_weights(self, staged: StagedWeights) -> bool:
        """Draft with them from the next call on; by whoever calls `propose`.

        Return False, with nothing changed, where the forward has been compiled since, or is being compiled:
        stage them again.
        """
        ...


def stage(runner: ModelRunner, weights: Mapping[str, torch.Tensor]) -> StagedWeights:
    """Prepare weights for a runner's model, which goes on running meanwhile.

    Raises:
        CheckpointError: a weight is missing, unknown or of another shape, or the model's weights cannot be
            exchanged: they are quantized, divided over ranks, or its compiled forward holds something that
            was computed from them.
    """
    loaded = runner.loaded
    name = loaded.path.name
    if loaded.quantization is not None or loaded.ranks is not None:
        how = "are quantized" if loaded.quantization is not None else "are divided over ranks"
        raise CheckpointError(f"{name} cannot be given other weights: its own {how}")
    parameters = dict(loaded.model.named_parameters())
    _require_same(name, parameters, weights)
    staged = {one: torch.empty_like(its).copy_(weights[one]) for one, its in parameters.items()}
    forward = None
    if isinstance(runner.graphs, CompiledForward) and runner.graphs.is_ready:
        forward = runner.graphs.stage_weights(_Replacements(parameters, staged))
    return StagedWeights(staged, forward)


def take(runner: ModelRunner, staged: StagedWeights) -> bool:
    """Have the next forward run with staged weights; see `TakesWeights.take_weights`."""
    graphs = runner.graphs
    if isinstance(graphs, CompiledForward) and not graphs.take_weights(staged.forward):
        return False
    with torch.no_grad():
        for name, parameter in runner.loaded.model.named_parameters():
            if parameter.device.type == "cpu":
                parameter.data = staged.parameters[name]
            else:
                parameter.copy_(staged.parameters[name])  # recorded graphs read where it lies
    return True


class _Replacements:
    """What takes the place of tensors that are parameters, or views of them."""

    def __init__(self, old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> None:
        self._by_storage: defaultdict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        for name, parameter in old.items():
            self._by_storage[_storage(parameter)].append((parameter, new[name]))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor | None:
        for old, new in self._by_storage.get(_storage(tensor), ()):
            start = tensor.storage_offset() - old.storage_offset()
            end = start + sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            if tensor.dtype is old.dtype and 0 <= start <= end < old.numel():
                return new.as_strided(tensor.shape, tensor.stride(), new.storage_offset() + start)
        return None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _require_same(
    name: str, parameters: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]
) -> None:
    for one, its in parameters.items():
        if one not in weights:
            raise CheckpointError(f"weights for {name}: {one} is missing")
        if weights[one].shape != its.shape:
            raise CheckpointError(
                f"weights for {name}: {one} is {list(weights[one].shape)} where the model has "
                f"{list(its.shape)}"
            )
        if not its.is_contiguous():
            raise CheckpointError(f"{name} cannot be given other weights: {one} is not contiguous")
    for one in weights:
        if one not in parameters:
            raise CheckpointError(f"weights for {name}: the model has no {one}")
