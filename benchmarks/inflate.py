"""Make a costlier checkpoint of the same function.

Inserts layers whose attention output and MLP output projections are zero, evenly between the original
layers: every inserted layer reads its weights, fills its K/V cache, and adds exactly nothing. Logits are
equal bit for bit, acceptance of any drafter stays what it was, and the target costs what is asked for.

    python -m benchmarks.inflate models/demo/target runs/target-100m --parameters 100e6
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file

from specdec.core.errors import CheckpointError, ConfigError, UserError
from specdec.model.layer_map import CONFIG_KEY

_LAYER_NAME = re.compile(r"^(?P<prefix>model\.layers\.)(?P<index>\d+)(?P<rest>\..+)$")
_SILENCED = (".self_attn.o_proj.", ".mlp.down_proj.")
_SHARD_BYTES = 2 << 30


def evenly_between(num_original: int, num_total: int) -> list[int]:
    """Indices of the original layers among `num_total`: first and last stay at the ends."""
    if num_total < num_original:
        raise ConfigError(f"cannot inflate {num_original} layers to {num_total}: that is fewer")
    if num_original == 1:
        return [0]
    return [round(i * (num_total - 1) / (num_original - 1)) for i in range(num_original)]


def layers_for_parameters(folder: Path, parameters: float) -> int:
    """Number of layers at which the checkpoint has about `parameters` parameters."""
    tensors = read_tensors(folder)
    num_layers = read_config(folder)["num_hidden_layers"]
    in_layers = sum(t.numel() for name, t in tensors.items() if _LAYER_NAME.match(name))
    rest = sum(t.numel() for name, t in tensors.items() if not _LAYER_NAME.match(name))
    return max(num_layers, round((parameters - rest) / (in_layers / num_layers)))


def inflate(source: Path, destination: Path, num_layers: int) -> None:
    """Write to `destination` the checkpoint of `source` with `num_layers` layers and the same logits.

    Raises:
        CheckpointError: `source` is no checkpoint with `model.layers.N` decoder layers.
        ConfigError: fewer layers than there are, or a destination that is not empty.
    """
    config = read_config(source)
    num_original = config["num_hidden_layers"]
    positions = evenly_between(num_original, num_layers)
    if destination.exists() and any(destination.iterdir()):
        raise ConfigError(f"{destination} is not empty: give a new folder")
    tensors = read_tensors(source)
    destination.mkdir(parents=True, exist_ok=True)
    save_tensors(destination, _inflated_tensors(tensors, num_original, num_layers, positions))
    _copy_rest(source, destination, num_original, num_layers)
    config = {**config, "num_hidden_layers": num_layers, CONFIG_KEY: positions}
    if isinstance(config.get("layer_types"), list):
        owners = _owners(num_layers, positions)
        config["layer_types"] = [config["layer_types"][owner] for owner in owners]
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _owners(num_layers: int, positions: list[int]) -> list[int]:
    """For every layer of the result, the original layer it is, or is a silenced copy of."""
    owners, current = [], 0
    for index in range(num_layers):
        while current + 1 < len(positions) and positions[current + 1] <= index:
            current += 1
        owners.append(current)
    return owners


def _inflated_tensors(
    tensors: dict[str, torch.Tensor], num_original: int, num_layers: int, positions: list[int]
) -> dict[str, torch.Tensor]:
    by_layer: dict[int, dict[str, torch.Tensor]] = {}
    result = {}
    for name, tensor in tensors.items():
        match = _LAYER_NAME.match(name)
        if match:
            by_layer.setdefault(int(match["index"]), {})[match["rest"]] = tensor
        else:
            result[name] = tensor
    if sorted(by_layer) != list(range(num_original)):
        raise CheckpointError(
            f"expected tensors model.layers.0 .. {num_original - 1}, found {sorted(by_layer)}"
        )
    if not all(any(part in rest for rest in by_layer[0]) for part in _SILENCED):
        raise CheckpointError(
            f"layers without {' and '.join(_SILENCED)} cannot be silenced: not a Llama-like model"
        )
    for index, owner in enumerate(_owners(num_layers, positions)):
        inserted = positions[owner] != index
        for rest, tensor in by_layer[owner].items():
            silenced = inserted and any(part in rest for part in _SILENCED)
            result[f"model.layers.{index}{rest}"] = torch.zeros_like(tensor) if silenced else tensor.clone()
    return result


def read_config(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's config.json.

    Raises:
        CheckpointError: it is missing, or no JSON.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    return config


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read the model's own tensors, without those of files beside it (an MTP module).

    Raises:
        CheckpointError: there are none.
    """
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no model*.safetensors")
    tensors = {}
    for file in files:
        with safe_open(file, framework="pt") as shard:
            tensors.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
    return tensors


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors as a checkpoint's weights, in several files where they are large."""
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    if total <= _SHARD_BYTES:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if filled + size > _SHARD_BYTES and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _copy_rest(source: Path, destination: Path, num_original: int, num_layers: int) -> None:
    """Copy tokenizer and generation files; renumber MTP modules, which count from the last layer."""
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy2(file, destination / file.name)
    for file in sorted(source.glob("*.safetensors")):
        if file.name.startswith("model"):
            continue
        with safe_open(file, framework="pt") as shard:
            renamed = {
                _renumbered(name, num_layers - num_original): shard.get_tensor(name)
                for name in shard.keys()  # noqa: SIM118
            }
        save_file(renamed, destination / file.name, metadata={"format": "pt"})


def _renumbered(name: str, shift: int) -> str:
    match = _LAYER_NAME.match(name)
    return f"{match['prefix']}{int(match['index']) + shift}{match['rest']}" if match else name


def main(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder of a Llama-like model.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
    layers: Annotated[int | None, typer.Option(help="Number of layers of the result.")] = None,
    parameters: Annotated[
        float, typer.Option(help="Parameters of the result, when --layers is not given.")
    ] = 100e6,
) -> None:
    """Insert do-nothing layers evenly between the layers of a checkpoint.

    Example: python -m benchmarks.inflate models/demo/target runs/target-100m --parameters 100e6
    """
    console = Console(stderr=True)
    try:
        num_layers = layers or layers_for_parameters(source, parameters)
        with console.status(f"writing {num_layers} layers to {destination}"):
            inflate(source, destination, num_layers)
    except UserError as error:
        console.print(f"[red]error:[/red] {error}")
        raise typer.Exit(2) from error
    console.print(f"{destination}: {num_layers} layers")


if __name__ == "__main__":
    typer.run(main)
