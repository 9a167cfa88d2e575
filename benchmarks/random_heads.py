"""Folders of heads that nobody has trained: what they cost is what trained ones cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.eagle import save_eagle
from specdec.drafters.checkpoints.eagle3 import save_eagle3
from specdec.drafters.checkpoints.hydra import save_hydra
from specdec.drafters.checkpoints.medusa import save_medusa
from specdec.drafters.checkpoints.mtp import save_mtp
from specdec.drafters.checkpoints.parallel_heads import save_parallel_heads
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3, Eagle3Settings, default_fused_layers
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.mtp import Mtp
from specdec.drafters.parallel_heads import ParallelHeads

_NUM_HEADS = 4


def save_random_heads(name: str, target: Path, folder: Path) -> None:
    """Write heads, drawn at random, for the model in `target`; `name` is one of their folders' names.

    Raises:
        ValueError: there are none of that name.
    """
    if name not in _MAKERS:
        raise ValueError(f"there are no heads {name!r}; known are {', '.join(_MAKERS)}")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    folder.mkdir(parents=True)
    _MAKERS[name](TargetParts.of(model), folder)


def _drawn(drafter: nn.Module) -> None:
    """Draw all weights so that rows keep their size."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * drawn if parameter.ndim == 1 else drawn / parameter.shape[-1] ** 0.5)
    drafter.to(torch.bfloat16)


def _one_layer(target: TargetParts) -> PretrainedConfig:
    return type(target.config)(**{**target.config.to_dict(), "num_hidden_layers": 1})


def _medusa(target: TargetParts, folder: Path) -> None:
    drafter = Medusa(target, num_heads=_NUM_HEADS)
    _drawn(drafter)
    save_medusa(drafter, folder, base_model="demo")


def _hydra(target: TargetParts, folder: Path, *, has_prefix_layer: bool = False) -> None:
    drafter = Hydra(target, num_heads=_NUM_HEADS, has_prefix_layer=has_prefix_layer)
    _drawn(drafter)
    save_hydra(drafter, folder, base_model="demo")


def _hydra_plus(target: TargetParts, folder: Path) -> None:
    _hydra(target, folder, has_prefix_layer=True)


def _parallel_heads(target: TargetParts, folder: Path) -> None:
    drafter = ParallelHeads(target, num_heads=_NUM_HEADS)
    _drawn(drafter)
    save_parallel_heads(drafter, folder, base_model="demo")


def _eagle(target: TargetParts, folder: Path) -> None:
    drafter = Eagle(target, _one_layer(target))
    _drawn(drafter)
    save_eagle(drafter, folder)


def _eagle3(target: TargetParts, folder: Path) -> None:
    settings = Eagle3Settings(config=_one_layer(target), fused_layers=default_fused_layers(target.num_layers))
    drafter = Eagle3(target, settings)
    _drawn(drafter)
    save_eagle3(drafter, folder)


def _mtp(target: TargetParts, folder: Path) -> None:
    drafter = Mtp(target)
    _drawn(drafter)
    save_mtp(drafter, folder)


_MAKERS: Mapping[str, Callable[[TargetParts, Path], None]] = {
    "medusa": _medusa,
    "hydra": _hydra,
    "hydra_plus": _hydra_plus,
    "parallel_heads": _parallel_heads,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "mtp": _mtp,
}
