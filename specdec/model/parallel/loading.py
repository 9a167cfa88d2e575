"""Reads one rank's part of a model, and no more, from safetensors.

transformers' own loading code runs on names of tensors that are cut when they are read: renaming, stacking
of experts, tying and buffers are its business, and only which part of a stored tensor is wanted is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from specdec.core.errors import CheckpointError
from specdec.model.checkpoint import Checkpoint
from specdec.model.parallel.cuts import Cut, VocabShard
from specdec.model.parallel.grid import RankGrid
from specdec.model.parallel.plan import UnsupportedParallelism
from specdec.model.parallel.stage import Stage, cut_stage
from specdec.model.parallel.stages import StagePlan
from specdec.model.parallel.surgery import cut_model
from specdec.model.stored_tensors import named_tensors, prepared


class StoredTensor:
    """A tensor in a file, of which a part is read when it is indexed with `...`, as transformers does."""

    def __init__(self, handle: Any, name: str, cut: Cut | None, note: Callable[[int], None]) -> None:
        self._slice = handle.get_slice(name)
        self._cut = cut
        self._note = note

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole stored tensor."""
        return tuple(self._slice.get_shape())

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        tensor = self._read()
        self._note(tensor.nbytes)
        return tensor

    def _read(self) -> torch.Tensor:
        if self._cut is None:
            whole: torch.Tensor = self._slice[...]
            return whole
        before = (slice(None),) * self._cut.dim
        pieces = [self._slice[(*before, slice(first, end))] for first, end in self._cut.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self._cut.dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPart:
    """One rank's part of a model."""

    model: PreTrainedModel
    info: dict[str, Any]
    """What transformers says of loading it."""
    vocab: VocabShard | None
    """Token ids of its logits; None: all, or it has none."""
    stage: Stage | None
    """Its stage, when there are several."""


def read_part(
    model_class: type[PreTrainedModel],
    checkpoint: Checkpoint,
    config: PretrainedConfig,
    grid: RankGrid,
    stages: StagePlan | None,
    *,
    note_read: Callable[[int], None],
    **options: Any,
) -> ReadPart:
    """Load this rank's part of a model.

    Args:
        model_class: class of the whole model.
        checkpoint: its files.
        config: its configuration.
        grid: this rank's place.
        stages: the layers of each stage; None when there is one.
        note_read: called with the number of bytes of every tensor read, from loading threads.
        options: of `from_pretrained`.

    Raises:
        UnsupportedParallelism: the model cannot be cut, or is stored in a way that cannot be read in parts.
    """
    cuts: dict[str, Cut] = {}
    vocab: VocabShard | None = None
    stage: Stage | None = None
    stored: dict[str, StoredTensor] = {}

    def prepare(model: PreTrainedModel) -> None:
        nonlocal vocab, stage
        whole = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if grid.tensor is not None:
            part = cut_model(model, grid.tensor)
            cuts.update(part.cuts)
            vocab = part.vocab
        if stages is not None:
            stage = cut_stage(model, stages, grid)
            vocab = vocab if stage.is_last else None
        stored.update(_stored_tensors(model, whole, cuts, checkpoint.weight_files, note_read))

    loaded: Any = prepared(model_class, prepare)
    model, info = loaded.from_pretrained(None, config=config, state_dict=stored, **options)
    return ReadPart(model=model, info=info, vocab=vocab, stage=stage)


def _stored_tensors(
    model: PreTrainedModel,
    whole: dict[str, tuple[int, ...]],
    cuts: Mapping[str, Cut],
    files: Sequence[Path],
    note_read: Callable[[int], None],
) -> dict[str, StoredTensor]:
    """Return the tensors of the checkpoint by their stored names, cut as the parameters that they go into.

    Those of the whole model that this part of it does not have are left out.

    Raises:
        CheckpointError: one of them has another shape than the whole model needs.
    """
    names = model.state_dict().keys()
    found: dict[str, StoredTensor] = {}
    for stored in named_tensors(model, whole, files):
        target = stored.parameter
        if target in whole and stored.converter is None:
            # Of a part nobody would see that the rest of it is not what config.json describes.
            shape = tuple(stored.handle.get_slice(stored.name).get_shape())
            if shape != whole[target]:
                raise CheckpointError(
                    f"{files[0].parent}: the weights do not fit config.json: tensor {stored.name} has shape "
                    f"{shape}, the model needs {whole[target]}"
                )
        if target in whole and target not in names:
            continue
        cut = cuts.get(target)
        if cut is not None and stored.pattern is not None:
            cut = _cut_before(stored.converter, stored.pattern, cut, whole[target])
        found[stored.name] = StoredTensor(stored.handle, stored.name, cut, note_read)
    return found


def read_whole(
    model: PreTrainedModel, checkpoint: Checkpoint, names: Collection[str]
) -> dict[str, torch.Tensor]:
    """Read parameters of a model in full, on the host.

    Args:
        model: the whole model, on the meta device.
        checkpoint: its files.
        names: of the parameters; of tied ones any may be the one that is stored.

    Raises:
        UnsupportedParallelism: one of them is not stored as it is.
    """
    hf_model: Any = model
    ties: dict[str, str] = hf_model.all_tied_weights_keys
    alike = {name: {name} for name in names}
    for target, source in ties.items():
        for name, group in alike.items():
            if name in (target, source):
                group |= {target, source}
    whole = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found: dict[str, torch.Tensor] = {}
    for stored in named_tensors(model, whole, checkpoint.weight_files):
        for name, group in alike.items():
            if stored.parameter in group and stored.pattern is None and name not in found:
                found[name] = stored.handle.get_tensor(stored.name)
    for name in names:
        if name not in found:
            raise UnsupportedParallelism(f"its weights hold no {name}, or not as one tensor")
    return found


def _cut_before(converter: Any, pattern: str, cut: Cut, shape: tuple[int, ...]) -> Cut:
    """Return the cut of one source of a conversion that makes the target come out with `cut`.

    Known are stacking (one tensor per expert) and concatenation (gate and up).
    """
    for operation in reversed(converter.operations):
        match type(operation).__name__:
            case "Concatenate" if operation.dim == cut.dim:
                block = shape[cut.dim] // len(converter.source_patterns)
                index = converter.source_patterns.index(pattern)
                cut = cut.within(index * block, (index + 1) * block)
            case "Concatenate":
                pass
            case "MergeModulelist" if operation.dim == 0 and cut.dim > 0:
                cut = Cut(cut.dim - 1, cut.ranges)
            case kind:
                raise UnsupportedParallelism(
                    f"its weights are stored in a form ({kind}) that cannot be read in parts"
                )
    return cut
