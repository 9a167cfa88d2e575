"""Divergences between the target's distribution p and the draft's q, for distillation.

GKD (Agarwal et al. 2024) chooses among forward KL, reverse KL and JSD; acceptance is one minus the total
variation (Leviathan et al. 2023, corollary 3.6), which DistillSpec (Zhou et al. 2024) considers too.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

DivergenceName = Literal["forward_kl", "reverse_kl", "jsd", "total_variation"]
DIVERGENCES: tuple[str, ...] = get_args(DivergenceName)


def divergence(name: DivergenceName, target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """Per-row divergence [N] (nats; total variation in [0, 1]) of fp32 logits [N, V] after temperature."""
    log_p, log_q = target_logits.log_softmax(dim=-1), draft_logits.log_softmax(dim=-1)
    if name == "forward_kl":
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    if name == "reverse_kl":
        return (log_q.exp() * (log_q - log_p)).sum(dim=-1)
    p, q = log_p.exp(), log_q.exp()
    if name == "jsd":
        log_m = torch.log(0.5 * (p + q) + 1e-12)
        return 0.5 * (p * (log_p - log_m) + q * (log_q - log_m)).sum(dim=-1)
    if name == "total_variation":
        return 0.5 * (p - q).abs().sum(dim=-1)
    raise ValueError(f"unknown divergence {name!r}: one of {', '.join(DIVERGENCES)}")
