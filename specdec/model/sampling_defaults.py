"""The sampling parameters that a checkpoint is meant to be used with, from its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from specdec.core.errors import CheckpointError, InputError
from specdec.core.sampling_params import SamplingDefaults

_FILE = "generation_config.json"


def sampling_defaults_of(folder: Path) -> SamplingDefaults:
    """Return what a checkpoint's generation_config.json says of sampling; what it leaves out is None.

    Its `do_sample` is left aside, as servers of the field do: a request says itself how it is sampled, by its
    temperature.

    Raises:
        CheckpointError: a value in it is none that can be sampled with; the text names it.
    """
    file = folder / _FILE
    if not file.is_file():
        return SamplingDefaults()
    try:
        content: Any = msgspec.json.decode(file.read_bytes())
        given = {name: content.get(name) for name in SamplingDefaults.__struct_fields__}
        if given["top_k"] in (0, -1):  # what others write where nothing is to be cut
            given["top_k"] = None
        if given["top_p"] == 0:
            given["top_p"], given["top_k"] = None, 1
        defaults = msgspec.convert(given, SamplingDefaults)
    except (msgspec.DecodeError, AttributeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    try:
        defaults.params().checked()
    except InputError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return defaults
