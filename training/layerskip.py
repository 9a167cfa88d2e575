"""LayerSkip's training recipe (Elhoushi et al. 2024, section 4.1): layer dropout and early-exit loss.

Layers are numbered l = 0 .. L-1; an exit "after layer l" applies the shared final norm and LM head to its
output.
"""

from __future__ import annotations

import math

import torch


def layer_dropout_rates(num_layers: int, max_rate: float, progress: float) -> list[float]:
    """p_l = S(t) D(l) p_max, D(l) = 2^(l/(L-1)) - 1 and (training from scratch) S(t) = 2^progress - 1.

    ``progress`` is t/(T-1) in [0, 1].
    """
    curriculum = math.exp(progress * math.log(2)) - 1
    return [
        curriculum * (math.exp(layer * math.log(2) / (num_layers - 1)) - 1) * max_rate
        for layer in range(num_layers)
    ]


def draw_kept_rows(rates: list[float], rows: int, generator: torch.Generator) -> torch.Tensor:
    """bool [L, rows]: which sequences run each layer (dropout is per sequence, without rescaling)."""
    draws = torch.rand(len(rates), rows, generator=generator)
    return draws >= torch.tensor(rates).unsqueeze(1)


def exit_scale(layer: int, num_layers: int, early_scale: float) -> float:
    """Unnormalised weight e(l) of the loss after ``layer`` (equation 6)."""
    if layer == num_layers - 1:
        return num_layers - 1 + early_scale * sum(range(num_layers - 1))
    return early_scale * sum(range(layer + 1))


def rotating_exit(step: int, num_layers: int) -> int:
    """Rotational curriculum C_rot: one early exit a step, in turn, over those of non-zero scale (1..L-2)."""
    return 1 + step % (num_layers - 2)


def exit_weights(early_layer: int, num_layers: int, early_scale: float) -> tuple[float, float]:
    """Normalised weights (early exit, final layer) of a step exiting after ``early_layer`` (equation 5)."""
    early = exit_scale(early_layer, num_layers, early_scale)
    final = exit_scale(num_layers - 1, num_layers, early_scale)
    return early / (early + final), final / (early + final)
