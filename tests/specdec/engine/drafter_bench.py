"""What drafters from hidden states are tried on: tiny models, heads fitted to them, what they say alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.specdec.engine.identity_settings import Setting
from tests.specdec.engine.linear_heads import LAYERS, fit_heads
from tests.specdec.engine.sampling_kinds import KINDS
from tests.specdec.engine.tiny_models import PROMPTS, Models


class Bench:
    """Heads, and what the target says alone; made once."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._heads: dict[str, torch.Tensor] = {}
        self._alone: dict[tuple[str, str], list[tuple[int, ...]]] = {}

    def heads(self, architecture: str) -> torch.Tensor:
        if architecture not in self._heads:
            self._heads[architecture] = self.fitted(architecture, LAYERS)
        return self._heads[architecture]

    def fitted(self, architecture: str, layers: Sequence[int]) -> torch.Tensor:
        texts = [
            [*prompt, *stream]
            for kind in ("greedy", "plain")
            for prompt, stream in zip(PROMPTS, self.alone(architecture, kind), strict=True)
        ]
        return fit_heads(self.models.reference(architecture), texts, num_heads=5, layers=layers)

    def alone(self, architecture: str, kind: str) -> list[tuple[int, ...]]:
        key = (architecture, kind)
        if key not in self._alone:
            with Setting("none", batch=1).engine(self.models, architecture) as engine:
                self._alone[key] = [engine.generate([one], KINDS[kind])[0].token_ids for one in PROMPTS]
        return self._alone[key]
