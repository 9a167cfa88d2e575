"""The sampling parameters that a checkpoint is meant to be used with, from its generation_config.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from specdec.core.errors import InputError
from specdec.core.sampling_params import LEAST_TEMPERATURE, SamplingDefaults
from specdec.model.generation_file import GENERATION_FILE, read_generation_file

logger = logging.getLogger(__name__)


def sampling_defaults_of(folder: Path) -> SamplingDefaults:
    """Return what a checkpoint's generation_config.json says of sampling; what it leaves out is None.

    Its `do_sample` is left aside, as servers of the field do: a request says itself how it is sampled, by its
    temperature. A value that nothing can be sampled with is left aside, too, with a warning: the model can be
    served without it.

    Raises:
        CheckpointError: the file cannot be read, or holds no JSON object.
    """
    content = read_generation_file(folder)
    kept: dict[str, Any] = {}
    for name in SamplingDefaults.__struct_fields__:
        value = _in_our_words(name, content.get(name))
        if value is None:
            continue
        try:
            msgspec.convert({name: value}, SamplingDefaults).params().checked()
        except (msgspec.ValidationError, InputError) as error:
            file = folder / GENERATION_FILE
            logger.warning("%s: %s; requests that do not say %s go without it", file, error, name)
        else:
            kept[name] = value
    return msgspec.convert(kept, SamplingDefaults)


def _in_our_words(name: str, value: Any) -> Any:
    """Return a value as requests would have it."""
    if isinstance(value, float) and name == "top_k" and value.is_integer():
        value = int(value)
    if name == "top_k" and value in (0, -1):  # what others write where nothing is to be cut
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "temperature" and is_number and 0.0 < value < LEAST_TEMPERATURE:
        return 0.0
    return value
