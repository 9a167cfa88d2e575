"""Reads one rank's part of a model, and no more, from safetensors.

transformers' own loading code runs on names of tensors that are cut when they are read: renaming, stacking
of experts, tying and buffers are its business, and only which part of a stored tensor is wanted is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel

from specdec.model.checkpoint import Checkpoint
from specdec.model.parallel.cuts import Cut, VocabShard
from specdec.model.parallel.group import RankGroup
from specdec.model.parallel.plan import UnsupportedParallelism
from specdec.model.parallel.surgery import RankPart, cut_model


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


def read_part(
    model_class: type[PreTrainedModel],
    checkpoint: Checkpoint,
    config: PretrainedConfig,
    group: RankGroup,
    *,
    note_read: Callable[[int], None],
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Any], VocabShard]:
    """Load this rank's part of a model.

    Args:
        model_class: class of the whole model.
        checkpoint: its files.
        config: its configuration.
        group: the ranks.
        note_read: called with the number of bytes of every tensor read, from loading threads.
        options: of `from_pretrained`.

    Returns:
        The part, transformers' loading info, and the token ids of the part's logits.

    Raises:
        UnsupportedParallelism: the model cannot be cut, or is stored in a way that cannot be read in parts.
    """
    parts: list[RankPart] = []
    stored: dict[str, StoredTensor] = {}

    def prepare(model: PreTrainedModel) -> None:
        whole = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        part = cut_model(model, group)
        parts.append(part)
        stored.update(_stored_tensors(model, whole, part.cuts, checkpoint.weight_files, note_read))

    loaded: Any = _prepared(model_class, prepare)
    model, info = loaded.from_pretrained(None, config=config, state_dict=stored, **options)
    return model, info, parts[0].vocab


def _prepared(
    model_class: type[PreTrainedModel], prepare: Callable[[PreTrainedModel], None]
) -> type[PreTrainedModel]:
    """Return a class that is `model_class`, but for `prepare` being called at the end of its constructor."""
    anything: Any = model_class

    def initialise(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        anything.__init__(self, *args, **kwargs)
        prepare(self)

    names = {
        "__init__": initialise,
        "__module__": model_class.__module__,
        "__qualname__": model_class.__qualname__,
    }
    return type(model_class.__name__, (model_class,), names)


def _stored_tensors(
    model: PreTrainedModel,
    whole: Mapping[str, tuple[int, ...]],
    cuts: Mapping[str, Cut],
    files: Sequence[Path],
    note_read: Callable[[int], None],
) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint, by its stored name, cut as the parameter that it goes into."""
    # Internal to transformers, present in all versions that we run with.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms: Any = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    names = model.state_dict()
    found: dict[str, StoredTensor] = {}
    for file in files:
        handle: Any = safe_open(file, framework="pt")
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
            if target not in names and name in names:
                target, pattern = name, None
            cut = cuts.get(target)
            if cut is not None and pattern is not None:
                converter = next(one for one in converters if pattern in one.source_patterns)
                cut = _cut_before(converter, pattern, cut, whole[target])
            found[name] = StoredTensor(handle, name, cut, note_read)
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
