"""What some families make of their LM head's products before these are logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

_MULTIPLY_BY_SCALING = frozenset({"hyperclovax"})
"""Model types that multiply by `logits_scaling`; all others divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitScaling:
    """A family's own numbers, in its own order: results are its own, bit by bit."""

    divisor: float = 1.0
    """Granite's `logits_scaling`."""
    factor: float = 1.0
    """Cohere's `logit_scale`."""
    cap: float | None = None
    """Gemma 2's `final_logit_softcapping`: logits become cap * tanh(logits / cap)."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> LogitScaling:
        """Read what the configuration of a text model says."""
        scaling = getattr(config, "logits_scaling", None) or 1.0
        factor = getattr(config, "logit_scale", None) or 1.0
        cap = getattr(config, "final_logit_softcapping", None)
        if config.model_type in _MULTIPLY_BY_SCALING:
            return cls(factor=scaling * factor, cap=cap)
        return cls(divisor=scaling, factor=factor, cap=cap)

    @property
    def slope(self) -> float:
        """How many times a small product its logit is."""
        return self.factor / self.divisor

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        """Return logits of the LM head's products, both [..., V]."""
        logits = products
        if self.divisor != 1.0:
            logits = logits / self.divisor
        if self.factor != 1.0:
            logits = logits * self.factor
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits
