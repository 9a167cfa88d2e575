"""A drafter's folder: config.json, and tensors by name in safetensors or, where allowed, in pickled files.

Of these, only such as hold tensors alone are read.
"""

from __future__ import annotations

import json
import pickle
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specdec.core.errors import CheckpointError
from specdec.model.checkpoint import CONFIG_FILE, checked_header, open_checkpoint, open_folder

WEIGHTS_FILE = "model.safetensors"
_MODEL_FILES = (WEIGHTS_FILE, "model.safetensors.index.json")
_HEAD_FILES = ("medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
_PICKLED_FILES = ("medusa_lm_head.pt", "hydra_lm_head.pt", "pytorch_model.bin")

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


def open_drafter(
    path: str | Path, *, allow_pickled: bool = False, passing_over_heads: bool = False
) -> DrafterFolder:
    """Look at a drafter's folder, or at that of a target that has a drafter in it.

    Files of heads go before those of a model, which are the target's where there are both. Of a whole model
    all safetensors are looked at: what drafts for it may be in a file of its own beside it.

    Args:
        path: the folder.
        allow_pickled: whether, without safetensors, a pickled file may be read.
        passing_over_heads: whether what is in a model is asked for, whatever files of heads lie beside it.

    Raises:
        CheckpointError: the folder, config.json or weights are missing or unreadable, or pickled unasked.
    """
    folder = open_folder(path)
    heads = [folder.path / name for name in _HEAD_FILES if (folder.path / name).is_file()]
    if heads and not passing_over_heads:
        return _opened(folder.path, folder.config, heads, {})
    if any((folder.path / name).is_file() for name in _MODEL_FILES):
        files = open_checkpoint(path).weight_files
        opened = _opened(folder.path, folder.config, files, {})
        if not _is_whole_model(opened.shapes):
            return opened
        beside = sorted(set(folder.path.glob("*.safetensors")) - {*files, *heads})
        return _opened(folder.path, folder.config, (*files, *beside), {})
    pickled = [folder.path / name for name in _PICKLED_FILES if (folder.path / name).is_file()]
    if not pickled:
        names = ", ".join((WEIGHTS_FILE, *_HEAD_FILES, *(_PICKLED_FILES if allow_pickled else ())))
        raise CheckpointError(f"{folder.path} has no weights of a drafter (one of {names})")
    if not allow_pickled:
        raise _pickled_error(pickled[0])
    return _opened(folder.path, folder.config, (pickled[0],), _unpickled(pickled[0]))


def _is_whole_model(names: Collection[str]) -> bool:
    """Whether tensors of these names are a model's; EAGLE's may be called so, too, and have an `fc`."""
    return "model.fc.weight" not in names and any(name.startswith("model.layers.0.") for name in names)


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


def _opened(
    path: Path, config: Mapping[str, Any], files: Iterable[Path], unpickled: dict[str, torch.Tensor]
) -> DrafterFolder:
    shapes = {name: tuple(tensor.shape) for name, tensor in unpickled.items()}
    places: dict[str, Path] = {}
    for file in files:
        if file.suffix != ".safetensors":
            places |= dict.fromkeys(unpickled, file)
            continue
        for name, entry in json.loads(checked_header(file)).items():
            if name != "__metadata__":
                shapes[name], places[name] = tuple(entry["shape"]), file
    return DrafterFolder(path=path, config=config, shapes=shapes, files=places, unpickled=unpickled)


def _pickled_error(file: Path) -> CheckpointError:
    named = {"pytorch_model": WEIGHTS_FILE}.get(file.stem, f"{file.stem}.safetensors")
    convert = (
        "import sys, torch; from safetensors.torch import save_file; "
        "tensors = torch.load(sys.argv[1], map_location='cpu', weights_only=True); "
        "save_file({name: one.clone() for name, one in tensors.items()}, sys.argv[2])"
    )
    return CheckpointError(
        f"{file} is pickled, and only safetensors are read unasked. Convert it: "
        f'python -c "{convert}" {shlex.quote(str(file))} {shlex.quote(str(file.with_name(named)))} - or have '
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
