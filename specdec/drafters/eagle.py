"""EAGLE's autoregression head (Li et al. 2024, section 4.1); EAGLE-2 is the same weights with another tree.

f'_{t+1} = block(W [e(x_{t+1}) ; f_t] + b), and the target's own LM head reads f'. The features f are the
target's behind its final norm.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PretrainedConfig

from specdec.attention.base import LayerAttention
from specdec.drafters.attention import Attends
from specdec.drafters.base import FINAL_NORM, Borrowed, FeatureDrafter, FeatureStep, TargetParts
from specdec.drafters.blocks import block_family, probe_layers, run_block


class Eagle(FeatureDrafter):
    """Names of modules are those of the published tensors."""

    def __init__(
        self,
        target: TargetParts,
        config: PretrainedConfig,
        *,
        has_bias: bool = True,
        has_embeddings: bool = False,
    ) -> None:
        """Make it of `config.num_hidden_layers` decoder layers, of the target's width.

        `has_bias` is of `fc`; `has_embeddings`: it has a copy of the target's embeddings of its own.
        """
        super().__init__(target)
        assert config.hidden_size == target.hidden_size, "features are the target's"
        num_layers = int(config.num_hidden_layers)
        family = block_family(config, num_layers)
        self.config = config
        self.fc = nn.Linear(2 * target.hidden_size, target.hidden_size, bias=has_bias)
        self.layers = nn.ModuleList(family.make_layer(index) for index in range(num_layers))
        # `fc` is what stands before the first layer: it has no norm of its own there.
        self.layers[0].input_layernorm = nn.Identity()
        self.embed_tokens = nn.Embedding(target.vocab_size, target.hidden_size) if has_embeddings else None
        self.rotary = family.rotary
        self._attention_layers = probe_layers(list(self.layers), self.rotary, target.hidden_size, 0)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return (FINAL_NORM,)

    @property
    def attention_layers(self) -> tuple[LayerAttention, ...]:
        return self._attention_layers

    @property
    def borrowed(self) -> frozenset[Borrowed]:
        return frozenset({"head", "embeddings"} if self.embed_tokens is None else {"head"})

    def step(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attention: Attends,
        depth: int = 0,
    ) -> FeatureStep:
        hidden: torch.Tensor = self.fc(torch.cat([embedded.to(features.dtype), features], dim=-1))
        rotary = self.rotary(hidden, positions)
        for block in self.layers:
            hidden = run_block(block, hidden, position_embeddings=rotary, paged=attention)
        return FeatureStep(hidden, hidden)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.target.logits(outputs)
