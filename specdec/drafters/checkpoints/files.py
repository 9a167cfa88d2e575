"""A drafter's folder: config.json, and tensors by name in safetensors or, where allowed, in pickled files.

Of these, only such as hold tensors alone are read.
"""

from __future__ import annotations

import json
import pickle
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specdec.core.errors import CheckpointError
from specdec.model.checkpoint import (
    CONFIG_FILE,
    checked_header,
    indexed_files,
    open_checkpoint,
    open_folder,
)

WEIGHTS_FILE = "model.safetensors"
_MODEL_FILES = (WEIGHTS_FILE, "model.safetensors.index.json")
FILES_OF_HEADS = {"medusa": "medusa_lm_head", "hydra": "hydra_lm_head"}
"""How files are called, but for their endings, that hold heads of these kinds alone."""
_ENDINGS = (".safetensors", ".pt")
_PICKLED_MODEL = "pytorch_model.bin"
_PICKLED_INDEX = "pytorch_model.bin.index.json"

TensorFormat = Literal["safetensors", "pt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFolder:
    """What a folder holds; tensors of safetensors are read when they are asked for."""

    path: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Of every tensor."""
    files: Mapping[str, Path]
    """Where it is."""
    unpickled: Mapping[str, torch.Tensor]
    """Tensors of pickled files, which are read at once."""
    passed_over: tuple[Path, ...] = ()
    """Files of heads beside the model that this is: pickled ones, or of other kinds than were asked for."""

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return these tensors, on the host."""
        wanted = list(names)
        found = {name: self.unpickled[name] for name in wanted if name in self.unpickled}
        by_file: dict[Path, list[str]] = {}
        for name in wanted:
            if name not in found:
                by_file.setdefault(self.files[name], []).append(name)
        for file, those in by_file.items():
            try:
                with safe_open(file, framework="pt", device="cpu") as tensors:
                    found |= {name: tensors.get_tensor(name) for name in those}
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read: {error}") from error
        return found


def open_drafter(path: str | Path, *, kind: str | None = None, allow_pickled: bool = False) -> DrafterFolder:
    """Look at a drafter's folder, or at that of a target that has a drafter in it.

    Files of heads go before those of a model, which are the target's where there are both. Of a whole model
    all safetensors are looked at: what drafts for it may be in a file of its own beside it.

    Args:
        path: the folder.
        kind: what is asked for (`registry.DrafterKind`): beside a model, files of heads of other kinds are
            passed over. None: whatever is there.
        allow_pickled: whether, without safetensors of a drafter, a pickled file may be read.

    Raises:
        CheckpointError: the folder, config.json or weights are missing or unreadable, or pickled unasked.
    """
    folder = open_folder(path)
    has_model = any((folder.path / name).is_file() for name in _MODEL_FILES)
    beside_model = _files_of_heads(folder.path)
    of_kind = [file for file in beside_model if file.stem == FILES_OF_HEADS.get(kind or "")]
    wanted = of_kind if of_kind or (has_model and kind is not None) else beside_model
    heads = [file for file in wanted if file.suffix == ".safetensors"]
    if heads:
        return _opened(folder.path, folder.config, heads)
    pickled = wanted[:1]
    if has_model:
        files = open_checkpoint(path).weight_files
        opened = _opened(folder.path, folder.config, files)
        if not _is_whole_model(opened.shapes):
            return opened
        if not (pickled and allow_pickled):
            beside = sorted(set(folder.path.glob("*.safetensors")) - {*files, *beside_model})
            opened = _opened(folder.path, folder.config, (*files, *beside))
            return replace(opened, passed_over=tuple(beside_model))
    elif not pickled:
        pickled = _pickled_model(folder.path)
    if not pickled:
        endings = _ENDINGS if allow_pickled else _ENDINGS[:1]
        names = [f"{name}{ending}" for ending in endings for name in FILES_OF_HEADS.values()]
        known = ", ".join((WEIGHTS_FILE, *names, *((_PICKLED_MODEL,) if allow_pickled else ())))
        raise CheckpointError(f"{folder.path} has no weights of a drafter (one of {known})")
    if not allow_pickled:
        raise pickled_error(*pickled)
    return _opened_pickled(folder.path, folder.config, pickled)


def _files_of_heads(folder: Path) -> list[Path]:
    """Return the files that hold heads alone; a pickled one only where it was not converted."""
    found: list[Path] = []
    for name in FILES_OF_HEADS.values():
        files = [folder / f"{name}{ending}" for ending in _ENDINGS]
        found += [file for file in files if file.is_file()][:1]
    return found


def _pickled_model(folder: Path) -> list[Path]:
    """Return the pickled file of a model, or the parts that an index names; nothing where there is neither.

    Raises:
        CheckpointError: a part is missing, or the index.
    """
    if (folder / _PICKLED_MODEL).is_file():
        return [folder / _PICKLED_MODEL]
    index = folder / _PICKLED_INDEX
    if not index.is_file():
        if not (found := sorted(folder.glob("pytorch_model-*.bin"))):
            return []
        more = f" and {len(found) - 1} more files like it" if len(found) > 1 else ""
        raise CheckpointError(
            f"{folder} has {found[0].name}{more}, but no {index.name}, which names all of them: fetch it, too"
        )
    return list(indexed_files(index))


def _is_whole_model(names: Collection[str]) -> bool:
    """Whether tensors of these names are a model's; EAGLE's may be called so, too, and have an `fc`."""
    has_fc = any(name in names for name in ("fc.weight", "model.fc.weight"))
    return not has_fc and any(name.startswith("model.layers.0.") for name in names)


def write_drafter(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    file_name: str = WEIGHTS_FILE,
) -> None:
    """Write config.json and tensors; the ending of `file_name` says how."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    write_tensors(folder / file_name, tensors)


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors of different memory under their names."""
    copied = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    if file.suffix == ".safetensors":
        save_file(copied, file, metadata={"format": "pt"})
    else:
        torch.save(copied, file)


def _opened(path: Path, config: Mapping[str, Any], files: Iterable[Path]) -> DrafterFolder:
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, Path] = {}
    for file in files:
        for name, entry in json.loads(checked_header(file)).items():
            if name != "__metadata__":
                shapes[name], places[name] = tuple(entry["shape"]), file
    return DrafterFolder(path=path, config=config, shapes=shapes, files=places, unpickled={})


def _opened_pickled(path: Path, config: Mapping[str, Any], files: Iterable[Path]) -> DrafterFolder:
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, Path] = {}
    for file in files:
        state = _unpickled(file)
        tensors |= state
        places |= dict.fromkeys(state, file)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return DrafterFolder(path=path, config=config, shapes=shapes, files=places, unpickled=tensors)


def pickled_error(*files: Path) -> CheckpointError:
    """Return what is said of a pickled file, or of the parts of one, that nobody allowed to be read."""
    first, *others = files
    what = f"{first} and {len(others)} more parts are" if others else f"{first} is"
    named = WEIGHTS_FILE if first.stem.startswith("pytorch_model") else f"{first.stem}.safetensors"
    convert = (
        "import sys, torch; from safetensors.torch import save_file; "
        "files = [torch.load(name, map_location='cpu', weights_only=True) for name in sys.argv[1:-1]]; "
        "save_file({name: one.clone() for tensors in files for name, one in tensors.items()}, sys.argv[-1])"
    )
    paths = " ".join(shlex.quote(str(file)) for file in (*files, first.with_name(named)))
    return CheckpointError(
        f"{what} pickled, and only safetensors are read unasked. Convert it: "
        f'python -c "{convert}" {paths} - or have '
        "it read as it is: speculative_config.allow_pickled_weights: true (of `drafthouse train`: "
        "--allow-pickled-weights)"
    )


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    try:
        # What is published so is tensors alone; anything else in the file is refused, not run.
        state: Any = torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read as a file of tensors alone: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()
    ):
        raise CheckpointError(f"{file} must hold a dictionary of tensors by name")
    return state
