"""Optimizers and learning-rate schedule shared by the recipes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from training.muon import new_muon


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRates:
    """How a module's learning rates differ from those of its run."""

    share: float = 1.0
    """Of the run's rates."""
    first_step: int = 0
    """Its weights stand still before; from then on they have a warm-up of their own."""


ORDINARY = ModuleRates()


def learning_rate_factor(step: int, num_steps: int, warmup_steps: int, constant_share: float) -> float:
    """Warm-up, then constant until ``constant_share`` of the run, then linear to zero at ``num_steps``."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_start = constant_share * num_steps
    if step <= decay_start:
        return 1.0
    return (num_steps - step) / (num_steps - decay_start)


def make_optimizers(
    modules: Iterable[tuple[nn.Module, ModuleRates]],
    *,
    muon_lr: float,
    adamw_lr: float,
    weight_decay: float,
    vocabulary_sizes: frozenset[int] = frozenset(),
) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices inside the blocks, AdamW for embeddings, experts and norms.

    Matrices with as many rows as ``vocabulary_sizes`` are LM heads, whatever their names: AdamW's too.
    Each group remembers its peak rate in ``peak_lr`` and its `ModuleRates`; `set_learning_rates` scales it.
    """
    by_rates: dict[ModuleRates, list[nn.Module]] = {}
    for module, rates in modules:
        by_rates.setdefault(rates, []).append(module)
    for_muon: list[dict[str, Any]] = []
    for_adamw: list[dict[str, Any]] = []
    for rates, members in by_rates.items():
        matrices, others = _matrices_and_others(members, vocabulary_sizes)
        # Experts of a mixture are stacked to one tensor, which Muon does not take.
        decayed = [parameter for parameter in others if parameter.ndim >= 2]
        vectors = [parameter for parameter in others if parameter.ndim < 2]
        own = {"share": rates.share, "first_step": rates.first_step}
        if matrices:
            for_muon.append({"params": matrices, **own})
        for_adamw.append({"params": decayed, "weight_decay": weight_decay, **own})
        for_adamw.append({"params": vectors, "weight_decay": 0.0, **own})
    muon = new_muon(for_muon, lr=muon_lr, weight_decay=weight_decay)
    adamw = torch.optim.AdamW(for_adamw, lr=adamw_lr, betas=(0.9, 0.95), fused=True)
    moving: set[int] = set()
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["share"] * group["lr"]
            moving.update(map(id, group["params"]))
    every = (parameter for members in by_rates.values() for one in members for parameter in one.parameters())
    assert all(id(parameter) in moving for parameter in every if parameter.requires_grad)
    return [muon, adamw]


def set_learning_rates(
    optimizers: list[torch.optim.Optimizer], factor: float, step: int = 0, warmup_steps: int = 0
) -> None:
    """Set groups to ``factor`` times their peak rates; those that start late to less while they warm up."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            first = group.get("first_step", 0)  # checkpoints of earlier versions know of none
            own = (step - first + 1) / max(1, warmup_steps) if first else 1.0
            group["lr"] = group["peak_lr"] * max(0.0, min(factor, own))


def _matrices_and_others(
    modules: Iterable[nn.Module], vocabulary_sizes: frozenset[int]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for module in modules:
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            is_embedding = (
                "embed_tokens" in name or "lm_head" in name or parameter.shape[0] in vocabulary_sizes
            )
            (matrices if parameter.ndim == 2 and not is_embedding else others).append(parameter)
    return matrices, others
