"""A fine-tuned model as what is added to another one: low-rank adapters in the layout of the `peft` library.

`adapter_config.json`, and in `adapter_model.safetensors` for a linear layer NAME of the base model
`base_model.model.NAME.lora_A.weight` [r, in] and `.lora_B.weight` [out, r]. What stands for the model is an
ordinary folder that `merge_adapter` makes: W + (alpha / r) B A, added in float32, in the base's own dtype.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specdec.core.errors import CheckpointError, ConfigError
from specdec.model.checkpoint import READABLE_DTYPES, Checkpoint, checked_header, open_checkpoint, revision_of

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BASE_REVISION_KEY = "drafthouse_base_revision"
"""Key of adapter_config.json: `revision_of` the base model. Adapters from elsewhere do not have it."""

_TENSOR = re.compile(r"^base_model\.model\.(.+)\.lora_([AB])\.weight$")
_UNSUPPORTED = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "use_dora",
    "fan_in_fan_out",
    "alora_invocation_tokens",  # added behind these tokens alone
    "layer_replication",  # to layers that the base does not have
)
_ON_ANOTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights`, or what they begin with, by which peft changes the base before training: an
adapter is added to that, not to the model that the base's folder holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankPair:
    """What is added to one matrix."""

    down: torch.Tensor
    """A, [r, in]."""
    up: torch.Tensor
    """B, [out, r]."""

    def added_to(self, weight: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        """Return `weight` [out, in] + scale B A, computed in float32 and rounded to `dtype`."""
        return (weight.float() + scale * (self.up.float() @ self.down.float())).to(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A folder's content."""

    path: Path
    scale: float
    base_revision: str | None
    pairs: Mapping[str, LowRankPair]
    """By name of the linear layer."""


def save_adapter(
    folder: Path, pairs: Mapping[str, LowRankPair], *, rank: int, alpha: float, base: Path
) -> None:
    """Write an adapter of the model in `base`."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
        BASE_REVISION_KEY: revision_of(open_checkpoint(base)),
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, pair in pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = pair.down.detach().cpu().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = pair.up.detach().cpu().contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def open_adapter(folder: Path) -> Adapter:
    """Read an adapter.

    Raises:
        CheckpointError: a file is missing or unreadable, or it is of a kind that cannot be merged; the text
            names the file, key or tensor.
    """
    config = _read_config(folder / CONFIG_FILE)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(f"{folder / CONFIG_FILE}: r and lora_alpha must be numbers, and r at least 1")
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {WEIGHTS_FILE}")
    checked_header(file)
    return Adapter(
        path=folder,
        scale=alpha / (math.sqrt(rank) if config.get("use_rslora") else rank),
        base_revision=config.get(BASE_REVISION_KEY),
        pairs=_pairs(file, rank),
    )


def merge_adapter(base: Path, folder: Path, out: Path) -> int:
    """Write the model that `base` becomes with an adapter to `out`, and return how many matrices differ.

    Raises:
        ConfigError: `out` holds something.
        CheckpointError: base or adapter cannot be read, or the adapter is not for this base.
    """
    checkpoint, adapter = open_checkpoint(base), open_adapter(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} holds something: give a folder that does not exist")
    if adapter.base_revision is not None and adapter.base_revision != revision_of(checkpoint):
        raise CheckpointError(
            f"{folder} was trained on another model than {base}: its {CONFIG_FILE} names the revision "
            f"{adapter.base_revision}, this one is {revision_of(checkpoint)}"
        )
    _check_shapes(checkpoint, adapter)
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(checkpoint.path.iterdir()):
        if file.is_file() and file not in checkpoint.weight_files:
            shutil.copy2(file, out / file.name)
    for file in checkpoint.weight_files:
        tensors = load_file(file)
        for name, pair in adapter.pairs.items():
            weight = tensors.get(f"{name}.weight")
            if weight is not None:
                tensors[f"{name}.weight"] = pair.added_to(weight, adapter.scale, weight.dtype)
        save_file(tensors, out / file.name, metadata={"format": "pt"})
    return len(adapter.pairs)


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise CheckpointError(f"{file.parent} has no {CONFIG_FILE}: it is no adapter")
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: peft_type must be LORA; other kinds cannot be merged")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{file}: bias must be none: trained biases cannot be merged")
    for key in _UNSUPPORTED:
        if config.get(key):
            raise CheckpointError(f"{file}: {key} is {config[key]!r}; adapters with that cannot be merged")
    begun_as = config.get("init_lora_weights")
    if isinstance(begun_as, str) and begun_as.lower().startswith(_ON_ANOTHER_BASE):
        raise CheckpointError(
            f"{file}: init_lora_weights is {begun_as!r}, with which peft changes the base before training: "
            "the adapter is not for the base as it was. Merge it with peft, or let peft save it as one that "
            "is (path_initial_model_for_weight_conversion of save_pretrained), where init_lora_weights "
            "becomes true"
        )
    return config


def _pairs(file: Path, rank: int) -> dict[str, LowRankPair]:
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.match(name)
        if match is None:
            raise CheckpointError(
                f"{file}: {name} is no tensor of an adapter (base_model.model.NAME.lora_A.weight, or lora_B)"
            )
        side = 0 if match.group(2) == "A" else 1
        if tensor.ndim != 2 or tensor.shape[side] != rank:
            raise CheckpointError(f"{file}: {name} is {tuple(tensor.shape)}, which is not of rank {rank}")
        halves.setdefault(match.group(1), {})[match.group(2)] = tensor
    for name, found in halves.items():
        if len(found) != 2:
            missing = "B" if "A" in found else "A"
            raise CheckpointError(f"{file} has no base_model.model.{name}.lora_{missing}.weight")
    if not halves:
        raise CheckpointError(f"{file} is empty")
    return {name: LowRankPair(down=found["A"], up=found["B"]) for name, found in halves.items()}


def _check_shapes(checkpoint: Checkpoint, adapter: Adapter) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for header in checkpoint.headers:
        entries = [(name, entry) for name, entry in json.loads(header).items() if name != "__metadata__"]
        shapes |= {name: tuple(entry["shape"]) for name, entry in entries}
        dtypes |= {name: entry["dtype"] for name, entry in entries}
    for name, pair in adapter.pairs.items():
        added = (pair.up.shape[0], pair.down.shape[1])
        there = shapes.get(f"{name}.weight")
        if there is None:
            raise CheckpointError(
                f"{adapter.path} adds to {name}.weight, which {checkpoint.path} does not have"
            )
        if there != added:
            raise CheckpointError(
                f"{adapter.path} adds {added} to {name}.weight, which is {there} in {checkpoint.path}"
            )
        if dtypes[f"{name}.weight"] not in READABLE_DTYPES:
            raise CheckpointError(
                f"{adapter.path} adds to {name}.weight, which {checkpoint.path} has quantised "
                f"({dtypes[f'{name}.weight']}); merge it into the unquantised model"
            )
