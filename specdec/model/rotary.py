"""Rotary tables that depend on the length of a sequence: each sequence gets its own.

Two kinds of rotary embedding look at the longest position in a forward, which in a flat batch would let one
request change another. Here the frequencies of a row follow from the sequence that it belongs to:

    longrope (Ding et al., 2024)   one set of frequencies for sequences of up to the original length, another
                                   for longer ones. A sequence that grows out of the original length is
                                   computed anew (as transformers does it for Phi-3), so that its K/V are
                                   those of a sequence of its length, whichever part of it was the prompt.
    dynamic NTK                    the base grows with the length. Rows of a prompt have the frequencies of
                                   its whole length, generated ones those of the length that they complete,
                                   which is what transformers computes with a cache.

What frequencies a row has travels in its position id: id variant * stride + position is for a sequence
whose K/V are of that variant (`core.kv_variants`). So they are tables over position ids like all others, also
compiled.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.core.kv_variants import KvVariants
from specdec.model.batch import PositionShift
from specdec.model.stated_positions import StatedPositions, stated_positions

_AGREED = 1e-2
"""Of cosines and sines: roundings of bf16 are less, other factors and other pairs much more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryRule:
    """How the rotary embedding of a model depends on the length of a sequence."""

    kind: Literal["longrope", "dynamic"]
    variants: KvVariants
    stride: int
    """More than any position: ids below it are positions of sequences of the ordinary variant."""

    @property
    def num_position_ids(self) -> int:
        """Ids for which there are tables."""
        has_others = self.kind == "longrope" and self.variants.original_len < self.stride
        return 2 * self.stride if has_others else self.stride

    @property
    def is_tabulated(self) -> bool:
        """Whether all ids that may occur are among them."""
        return self.kind == "longrope" or self.variants.original_len >= self.stride

    def shift(self, variant: int, num_prompt_tokens: int) -> PositionShift | None:
        """Return what is added to the position ids of a sequence whose K/V are of this variant."""
        if variant == 0:
            return None
        end = num_prompt_tokens if self.variants.by_prompt else sys.maxsize
        return PositionShift(self.stride * variant, end)


def rule_of(config: PretrainedConfig, max_model_len: int) -> RotaryRule | None:
    """Return the rule of a model whose rotary embedding depends on the length; None for all others."""
    stated = positions_stated_in(config)
    if stated.kind is None or stated.original_len is None:
        return None
    variants = KvVariants(original_len=stated.original_len, by_prompt=stated.kind == "dynamic")
    return RotaryRule(kind=stated.kind, variants=variants, stride=max_model_len)


def longest_sequence(config: PretrainedConfig) -> int | None:
    """Return the number of positions that a configuration is made for, None when it does not say."""
    return positions_stated_in(config).num_positions


def positions_stated_in(config: PretrainedConfig) -> StatedPositions:
    """Return what a configuration, as transformers reads it, says of positions."""
    text_config: Any = config.get_text_config()
    names = ("model_type", "max_position_embeddings", "original_max_position_embeddings", "rope_parameters")
    return stated_positions({name: getattr(text_config, name, None) for name in names})


def install(model: PreTrainedModel, rule: RotaryRule) -> bool:
    """Let a loaded model's rotary embedding follow `rule`; return whether it has one that can.

    One that says something else than what takes its place, at lengths of either kind, cannot: its pairs may
    lie side by side, or its numbers have factors of their own.
    """
    found = False
    for module in model.modules():
        anything: Any = module
        if getattr(anything, "rope_type", None) == rule.kind and hasattr(anything, "inv_freq"):
            rows = _LongRows(anything, rule) if rule.kind == "longrope" else _DynamicRows(anything, rule)
            x = torch.zeros(1, dtype=model.dtype, device=anything.inv_freq.device)
            forward = _forward(anything, rows, rule.stride, _own_dtype(anything, x))
            if not _agree(anything.forward, forward, rule, x):
                return False
            anything.forward = forward
            found = True
    return found


def _own_dtype(module: Any, x: torch.Tensor) -> torch.dtype | None:
    """Return what a rotary embedding gives for a model of the dtype of `x`; None: the same dtype."""
    if x.is_meta:
        return None
    own_dtype: torch.dtype = module.forward(x, torch.zeros((1, 1), dtype=torch.long, device=x.device))[
        0
    ].dtype
    return None if own_dtype == x.dtype else own_dtype


@torch.no_grad()
def _agree(own: Any, ours: Any, rule: RotaryRule, x: torch.Tensor) -> bool:
    """Whether transformers' own rotary embedding and ours say the same of short texts, and of a long one.

    On paper there are no numbers that could differ.
    """
    if x.is_meta:
        return True
    original_len = rule.variants.original_len
    short = min(4, original_len)
    lengths = (short, original_len + 1, short)  # own ones forget the long one at last
    for length in lengths if original_len < rule.stride else (short,):
        positions = torch.tensor([[0, 1, length // 2, length - 1]], device=x.device)
        table = rule.variants.of(num_prompt_tokens=length, num_tokens=length)
        for own_part, part in zip(own(x, positions), ours(x, positions + table * rule.stride), strict=True):
            if own_part.shape != part.shape or not torch.allclose(own_part, part, rtol=0.0, atol=_AGREED):
                return False
    return True


class _LongRows:
    def __init__(self, module: Any, rule: RotaryRule) -> None:
        self._short_D = module.original_inv_freq.float()
        self._long_D, _ = ROPE_INIT_FUNCTIONS["longrope"](
            module.config, self._short_D.device, seq_len=rule.variants.original_len + 1
        )

    def __call__(self, positions: torch.Tensor, sets: torch.Tensor) -> torch.Tensor:
        return torch.where(sets[..., None] > 0, self._long_D, self._short_D)


class _DynamicRows:
    """base * (factor * length / original - (factor - 1)) ^ (d / (d - 2)), for each row's length."""

    def __init__(self, module: Any, rule: RotaryRule) -> None:
        parameters = module.config.rope_parameters
        self._base = float(parameters["rope_theta"])
        self._factor = float(parameters["factor"])
        self._original_len = rule.variants.original_len
        num_dims = 2 * module.inv_freq.numel()
        self._power = num_dims / (num_dims - 2)
        device = module.inv_freq.device
        self._exponents_D = torch.arange(0, num_dims, 2, device=device).float() / num_dims

    def __call__(self, positions: torch.Tensor, sets: torch.Tensor) -> torch.Tensor:
        lengths = torch.where(sets > 0, sets, positions + 1).clamp(min=self._original_len)
        growth = self._factor * lengths / self._original_len - (self._factor - 1)
        bases = self._base * growth**self._power
        frequencies: torch.Tensor = 1.0 / bases[..., None] ** self._exponents_D
        return frequencies


def _forward(
    module: Any, frequencies: _LongRows | _DynamicRows, stride: int, dtype: torch.dtype | None
) -> Any:
    """As transformers' own rotary embeddings, with the frequencies of each row.

    x: any tensor of the model's dtype; position_ids [1, T]. Returns cos and sin, [1, T, head size], of
    `dtype` (None: that of x).
    """

    @torch.no_grad()
    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sets = torch.div(position_ids, stride, rounding_mode="floor")
        positions = position_ids - sets * stride
        angles = positions[..., None].float() * frequencies(positions, sets)
        angles = torch.cat((angles, angles), dim=-1)
        cosines = angles.cos() * module.attention_scaling
        sines = angles.sin() * module.attention_scaling
        return cosines.to(dtype or x.dtype), sines.to(dtype or x.dtype)

    return forward
