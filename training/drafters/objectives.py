"""Losses of drafters over rows: what each paper trains with.

Rows: tokens int64 [B, T], hidden [B, T, F], and of the target at every position its own logits or its state
behind the final norm. Position t drafts x_{t+2+d} at depth d, which the target's logits at t + 1 + d predict.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from specdec.drafters.attention import CausalRows, UnrolledRows
from specdec.drafters.base import FeatureDrafter
from specdec.drafters.eagle import Eagle
from specdec.drafters.hydra import Hydra
from specdec.drafters.medusa import Medusa
from specdec.drafters.parallel_heads import ParallelHeads
from specdec.drafters.vocabulary import DraftVocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRows:
    """What the target makes of rows of tokens."""

    tokens: torch.Tensor
    """int64 [B, T]."""
    hidden: torch.Tensor
    """[B, T, F]: what the drafter reads."""
    final: torch.Tensor
    """[B, T, H]: behind the final norm."""
    logits: torch.Tensor
    """[B, T, V]."""


def soft_cross_entropy(
    logits: torch.Tensor, target_logits: torch.Tensor, vocabulary: DraftVocabulary | None
) -> torch.Tensor:
    """Mean cross entropy of drafts [B, R, V'] to the target's distributions [B, R, V].

    With a vocabulary of the drafter's own, the target's distribution over that is what counts, and only where
    its likeliest token is in it (as EAGLE-3 is trained).
    """
    if vocabulary is None:
        weights = torch.ones_like(target_logits[..., 0], dtype=torch.float32)
    else:
        weights = vocabulary.t2d[target_logits.argmax(dim=-1)].float()
        target_logits = target_logits[..., vocabulary.target_ids]
    log_q = logits.float().log_softmax(dim=-1)
    p = target_logits.float().softmax(dim=-1)
    losses = -(p * log_q).sum(dim=-1) * weights
    return losses.sum() / weights.sum().clamp(min=1.0)


def decayed_mean(losses: list[torch.Tensor], decay: float) -> torch.Tensor:
    """Mean over depths, each weighing ``decay`` times the one before."""
    weights = [decay**depth for depth in range(len(losses))]
    weighted = [weight * loss for weight, loss in zip(weights, losses, strict=True)]
    return torch.stack(weighted).sum() / sum(weights)


def medusa_losses(heads: Medusa, hidden: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Per head: cross entropy to the text (Medusa, equation 1); of hidden [B, T, H], tokens int64 [B, T]."""
    losses = []
    for depth, head in enumerate(heads.heads):
        logits = head(hidden[:, : -2 - depth])
        losses.append(F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 2 + depth :].flatten()))
    return losses


def text_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross entropy of a language model's logits [B, T, V] to the text int64 [B, T]."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def hydra_losses(heads: Hydra, rows: TargetRows) -> list[torch.Tensor]:
    """Per head: cross entropy to the target's distribution, behind the text itself (Hydra++, section 4.2)."""
    num_positions = rows.tokens.shape[1]
    positions = torch.arange(num_positions, device=rows.tokens.device).expand(rows.tokens.shape)
    prepared = heads.prepare(rows.hidden, positions, CausalRows())
    losses = []
    for depth in range(heads.max_depth):
        end = num_positions - 1 - depth
        path = torch.stack([rows.tokens[:, 1 + i : 1 + i + end] for i in range(depth + 1)], dim=-1)
        logits = heads.logits(depth, prepared[:, :end], path)
        losses.append(soft_cross_entropy(logits, rows.logits[:, 1 + depth :], None))
    return losses


def parallel_losses(heads: ParallelHeads, rows: TargetRows) -> list[torch.Tensor]:
    """Per head: cross entropy to the text (Gloeckle et al. 2024, equation 2)."""
    positions = torch.arange(rows.tokens.shape[1], device=rows.tokens.device).expand(rows.tokens.shape)
    every = heads.logits(heads.prepare(rows.hidden, positions, CausalRows()))
    return [
        F.cross_entropy(logits[:, : -2 - depth].flatten(0, 1).float(), rows.tokens[:, 2 + depth :].flatten())
        for depth, logits in enumerate(every)
    ]


def eagle_losses(
    head: Eagle, rows: TargetRows, *, noise: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """(regression of features, classification): EAGLE, equations 1 and 2, with noise on what it reads."""
    features = rows.hidden[:, :-1].float()
    drawn = torch.rand(features.shape, generator=generator).to(features.device)
    features = features + noise * (2 * drawn - 1)
    following = rows.tokens[:, 1:]
    positions = torch.arange(following.shape[1], device=following.device).expand(following.shape)
    step = head.step(head.embed(following), features, positions, CausalRows())
    regression = F.smooth_l1_loss(step.features.float(), rows.final[:, 1:].float())
    classification = soft_cross_entropy(head.logits(step.outputs), rows.logits[:, 1:], None)
    return regression, classification


def unrolled_losses(drafter: FeatureDrafter, rows: TargetRows, num_steps: int) -> list[torch.Tensor]:
    """Per depth: cross entropy to the target's distribution when the drafter goes on with its own features.

    EAGLE-3's training-time test (section 3.2): tokens are those of the text, features the drafter's.
    """
    num_rows = rows.tokens.shape[1] - 1
    attention = UnrolledRows()
    features = drafter.fuse(rows.hidden[:, :-1])
    positions = torch.arange(num_rows, device=rows.tokens.device).expand(len(rows.tokens), num_rows)
    losses = []
    for depth in range(num_steps):
        # Rows at the end have no text that far ahead; what stands there is not counted.
        following = F.pad(rows.tokens[:, 1 + depth :], (0, depth))
        step = drafter.step(drafter.embed(following), features, positions + depth, attention, depth)
        features = step.features
        end = num_rows - depth
        logits = drafter.logits(step.outputs[:, :end])
        losses.append(soft_cross_entropy(logits, rows.logits[:, 1 + depth :], drafter.vocabulary))
    return losses
