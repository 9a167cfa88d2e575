"""What transformers makes of the tensors in a checkpoint's files, for those who read some of them otherwise.

All that we use of transformers' own loading code, which it does not promise to keep, is here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from transformers import PreTrainedModel


class NamedTensor(NamedTuple):
    """A tensor in a file, and the parameter of the whole model that it goes into."""

    handle: Any
    """The open file."""
    name: str
    """Of the tensor in it."""
    parameter: str
    converter: Any
    """What makes the parameter of it and others; None: it is the parameter."""
    pattern: str | None
    """Of the converter's sources, the one that it is."""


def named_tensors(
    model: PreTrainedModel, parameters: Collection[str], files: Sequence[Path]
) -> Iterator[NamedTensor]:
    """Go through all tensors of files, given the names of the whole model's parameters."""
    # Internal to transformers, present in all versions that we run with.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms: Any = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    known: Any = parameters
    for file in files:
        handle: Any = safe_open(file, framework="pt")
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
            if target not in parameters and name in parameters:
                target, pattern = name, None
            converter = next((one for one in converters if pattern in one.source_patterns), None)
            yield NamedTensor(handle, name, target, converter, pattern)


def prepared(
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
