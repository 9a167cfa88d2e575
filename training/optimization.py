"""Optimizers and learning-rate schedule shared by the recipes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def learning_rate_factor(step: int, num_steps: int, warmup_steps: int, constant_share: float) -> float:
    """Warm-up, then constant until ``constant_share`` of the run, then linear to zero at ``num_steps``."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_start = constant_share * num_steps
    if step <= decay_start:
        return 1.0
    return (num_steps - step) / (num_steps - decay_start)


def make_optimizers(
    modules: Iterable[nn.Module],
    *,
    muon_lr: float,
    adamw_lr: float,
    weight_decay: float,
    vocabulary_sizes: frozenset[int] = frozenset(),
) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices inside the blocks, AdamW for embeddings and norms.

    Matrices with as many rows as ``vocabulary_sizes`` are LM heads, whatever their names: AdamW's too.
    Each group remembers its peak rate in ``peak_lr``; `set_learning_rates` scales it.
    """
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
    embeddings = [parameter for parameter in others if parameter.ndim == 2]
    vectors = [parameter for parameter in others if parameter.ndim < 2]
    muon = torch.optim.Muon(
        matrices, lr=muon_lr, momentum=0.95, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        [{"params": embeddings, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=adamw_lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    for optimizer in (muon, adamw):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adamw]


def set_learning_rates(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every group to ``factor`` times its peak rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["peak_lr"]
