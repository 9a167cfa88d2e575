"""What can be said about a model folder without building the model: files, integrity, revision.

All errors name the folder or the file and the cause. Nothing here touches the network.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specdec.core.errors import CheckpointError, DrafthouseError

CONFIG_FILE = "config.json"
_WEIGHTS_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_ADAPTER_FILE = "adapter_config.json"
_FULL_HASH_LIMIT_BYTES = 2 << 30
_CHUNK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit."""
READABLE_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Of weights, in the words of safetensors; all others are codes of numbers."""


class LoadProgress(Protocol):
    """Called while a model loads, from the loading thread."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` units of `stage` ("hash", "weights", "probe") are finished."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A folder that says what model it holds; nothing of its weights has been looked at."""

    path: Path
    config: dict[str, Any]
    """Content of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(ModelFolder):
    """A model folder whose files are all there and whole."""

    weight_files: tuple[Path, ...]
    headers: tuple[bytes, ...]
    """The raw safetensors header of each weight file."""

    @property
    def weight_bytes(self) -> int:
        """Size of all weight files."""
        return sum(file.stat().st_size for file in self.weight_files)


def open_folder(path: str | Path) -> ModelFolder:
    """Read what a model folder says of its model.

    Raises:
        CheckpointError: folder or config.json are missing or unreadable.
    """
    folder = Path(path)
    with _reading(f"model folder {folder}"):
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise CheckpointError(
                f"model folder {folder} {what}; `model` must be a local Hugging Face model folder"
            )
        return ModelFolder(path=folder, config=read_json(folder / CONFIG_FILE))


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Check that `path` is a complete model folder.

    Raises:
        CheckpointError: folder, config.json or weights are missing, unreadable, truncated or corrupt.
    """
    folder = open_folder(path)
    with _reading(f"the weights in {folder.path}"):
        weight_files = tuple(_weight_files(folder.path))
        return Checkpoint(
            path=folder.path,
            config=folder.config,
            weight_files=weight_files,
            headers=tuple(checked_header(file) for file in weight_files),
        )


def outline_of(checkpoint: Checkpoint) -> str:
    """Return a hash over config.json and names, shapes and places of all tensors, without reading weights."""
    digest = hashlib.blake2b((checkpoint.path / CONFIG_FILE).read_bytes(), digest_size=16)
    for file, header in zip(checkpoint.weight_files, checkpoint.headers, strict=True):
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode() + header)
    return digest.hexdigest()


def revision_of(checkpoint: Checkpoint, progress: LoadProgress | None = None) -> str:
    """Return a hash over config.json and the weights, as 32 hex digits.

    Up to 2 GiB of weights are hashed in full. Beyond that, to start in bearable time, only names, sizes
    and safetensors headers are: two such checkpoints that differ in nothing but weight values (a model
    and its fine-tune, say) then have the same revision.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update((checkpoint.path / CONFIG_FILE).read_bytes())
    total = checkpoint.weight_bytes
    in_full = total <= _FULL_HASH_LIMIT_BYTES
    done = 0
    for file, header in zip(checkpoint.weight_files, checkpoint.headers, strict=True):
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(header)
        if not in_full:
            continue
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress("hash", done, total)
    return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder.

    Raises:
        CheckpointError: it is missing, or holds something else.
    """
    if not file.is_file():
        what = _adapter_hint(file.parent) or "it is not a Hugging Face model folder"
        raise CheckpointError(f"{file.parent} has no {file.name}: {what}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def _weight_files(folder: Path) -> Iterator[Path]:
    if (folder / _WEIGHTS_FILE).is_file():
        yield folder / _WEIGHTS_FILE
        return
    if not (folder / _INDEX_FILE).is_file():
        raise CheckpointError(_weights_lack(folder))
    yield from indexed_files(folder / _INDEX_FILE)


def indexed_files(index: Path) -> Iterator[Path]:
    """Yield the files that an index names, which lie beside it, each once and by name.

    Raises:
        CheckpointError: it names none, or one is not there.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must give a file name for every tensor")
    for name in sorted(set(weight_map.values())):
        file = index.parent / name
        if not file.is_file():
            raise CheckpointError(f"{index.parent} lacks the weight file {name} that {index.name} names")
        yield file


def _weights_lack(folder: Path) -> str:
    """Say what is there where weights should be."""
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    adapter = _adapter_hint(folder)
    if shards and adapter is None:
        more = f" and {len(shards) - 1} more files like it" if len(shards) > 1 else ""
        return (
            f"{folder} has {shards[0]}{more}, but neither {_WEIGHTS_FILE} nor {_INDEX_FILE}, which says in "
            "which file a tensor is"
        )
    hint = f": {adapter}" if adapter else _format_hint(folder)
    return f"{folder} has no weights ({_WEIGHTS_FILE} or {_INDEX_FILE}){hint}"


def _format_hint(folder: Path) -> str:
    """Say which file is of another format; of transformers' own, before safetensors, how to convert it."""
    pickled = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    others = pickled or [
        file.name for kind in ("bin", "pt", "gguf") for file in sorted(folder.glob(f"*.{kind}"))
    ]
    if not others:
        return ""
    hint = f"; {others[0]} is of a format that is not read, convert it to safetensors"
    # By way of the model, because that writes the index that several files need.
    convert = (
        "import sys; from transformers import AutoModelForCausalLM as Model; "
        "Model.from_pretrained(sys.argv[1], dtype='auto').save_pretrained(sys.argv[1])"
    )
    return f'{hint}: python -c "{convert}" {shlex.quote(str(folder))}' if pickled else hint


def _adapter_hint(folder: Path) -> str | None:
    if not (folder / _ADAPTER_FILE).is_file():
        return None
    return f"it is an adapter ({_ADAPTER_FILE}), merge it into its base model first (drafthouse merge)"


def checked_header(file: Path) -> bytes:
    """Return the raw header of a safetensors file whose length agrees with it."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{file} is not a whole safetensors file: {_first_bytes_hint(prefix, size)}"
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (
        UnicodeDecodeError,
        json.JSONDecodeError,
        AttributeError,
        KeyError,
        TypeError,
        IndexError,
    ) as error:
        raise CheckpointError(
            f"{file} is corrupt: its safetensors header cannot be read ({error})"
        ) from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        cause = "truncated" if size < expected else "corrupt"
        raise CheckpointError(f"{file} is {cause}: it has {size} bytes, its header describes {expected}")
    return raw


def _first_bytes_hint(prefix: bytes, size: int) -> str:
    if prefix.startswith(b"version "):
        return "it is a Git LFS pointer, fetch the file itself (git lfs pull)"
    return f"its header does not fit into its {size} bytes (truncated or corrupt)"


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn what the system says of files (no right to read, a name too long) into an error that says so."""
    try:
        yield
    except OSError as error:
        at = "" if error.filename is None else f" ({str(error.filename)[-200:]})"
        raise CheckpointError(f"{what[:400]} cannot be read: {error.strerror or error}{at}") from error


@contextmanager
def foreign_files(problem: str) -> Iterator[None]:
    """Turn whatever transformers stumbles over in a model folder into an error that says so."""
    try:
        yield
    except DrafthouseError:
        raise  # it says so already
    except Exception as error:  # its checks of foreign files raise errors of many libraries
        raise CheckpointError(f"{problem}: {type(error).__name__}: {error}") from error
