"""Make a checkpoint of the same function whose query heads have K/V of their own.

Grouped queries share K/V heads; here each K/V head is written as often as it is shared. Logits are the same,
and a token's K/V take as many times the memory: what models without grouped queries (Llama 2 7B, say) pay.

    python -m benchmarks.multi_head models/demo/target runs/target-mha
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

from benchmarks.inflate import read_config, read_tensors, save_tensors
from specdec.core.errors import CheckpointError, ConfigError, UserError

_KV_PROJECTION = re.compile(r"\.self_attn\.[kv]_proj\.(weight|bias)$")


def repeat_kv_heads(source: Path, destination: Path) -> int:
    """Write the checkpoint of `source` with as many K/V heads as query heads; return how many there are.

    A multi-token-prediction module beside the model is left out.

    Raises:
        CheckpointError: `source` is no checkpoint whose attention has k_proj and v_proj.
        ConfigError: a destination that is not empty.
    """
    config = read_config(source)
    if destination.exists() and any(destination.iterdir()):
        raise ConfigError(f"{destination} is not empty: give a new folder")
    num_heads: int = config["num_attention_heads"]
    num_kv_heads: int = config.get("num_key_value_heads") or num_heads
    tensors = read_tensors(source)
    if not any(_KV_PROJECTION.search(name) for name in tensors):
        raise CheckpointError(f"{source}: no k_proj and v_proj, whose heads could be repeated")
    destination.mkdir(parents=True, exist_ok=True)
    repeated = {
        name: _repeated(tensor, num_kv_heads, num_heads // num_kv_heads)
        if _KV_PROJECTION.search(name)
        else tensor
        for name, tensor in tensors.items()
    }
    save_tensors(destination, repeated)
    _write_rest(source, destination, {**config, "num_key_value_heads": num_heads})
    return num_heads


def _repeated(tensor: torch.Tensor, num_kv_heads: int, times: int) -> torch.Tensor:
    """Repeat each head of the first dimension [num_kv_heads * head_dim]."""
    heads = tensor.unflatten(0, (num_kv_heads, -1))
    return heads.repeat_interleave(times, dim=0).flatten(0, 1).contiguous()


def _write_rest(source: Path, destination: Path, config: dict[str, Any]) -> None:
    config.pop("num_nextn_predict_layers", None)
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in source.iterdir():
        is_written = file.name == "config.json" or file.name.endswith(".index.json")
        if file.is_file() and file.suffix != ".safetensors" and not is_written:
            shutil.copy2(file, destination / file.name)


def main(
    source: Annotated[Path, typer.Argument(help="Hugging Face folder of a Llama-like model.")],
    destination: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
) -> None:
    """Give every query head of a checkpoint K/V of its own.

    Example: python -m benchmarks.multi_head models/demo/target runs/target-mha
    """
    console = Console(stderr=True)
    try:
        num_heads = repeat_kv_heads(source, destination)
    except UserError as error:
        console.print(f"[red]error:[/red] {error}")
        raise typer.Exit(2) from error
    console.print(f"{destination}: {num_heads} K/V heads")


if __name__ == "__main__":
    typer.run(main)
