"""EAGLE-3 (Li et al. 2025, section 3.1) and 3.1 (arXiv 2605.09992): features fused of several layers.

    g_t = W [h_t^low ; h_t^mid ; h_t^high]                        (3.1: each normed first, `fc_norm`)
    a_t = midlayer(norm(e(x_{t+1})) ; norm(g_t)), residual g_t    (`norm_before_residual`: norm(g_t))
    logits = lm_head(norm(a_t)), and a_t stands for g_{t+1}       (3.1 `norm_output`: norm(a_t) does)

The LM head is the drafter's own, over a part of the target's vocabulary; or it is the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from specdec.attention.base import LayerAttention
from specdec.core.errors import CheckpointError
from specdec.drafters.attention import Attends
from specdec.drafters.base import Borrowed, FeatureDrafter, FeatureStep, TargetParts
from specdec.drafters.blocks import BlockFamily, block_family, probe_layers
from specdec.drafters.vocabulary import DraftVocabulary


def default_fused_layers(num_layers: int) -> tuple[int, ...]:
    """Return the states that are fused where a checkpoint names none: after 2, half, and all but 3 layers."""
    return (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Settings:
    """What a checkpoint's config.json says, beyond its decoder layer."""

    config: PretrainedConfig
    """Of the decoder layer; its hidden size may differ from the target's."""
    fused_layers: tuple[int, ...]
    """As `Drafter.hidden_layers`."""
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    """One norm over the fused states side by side (gpt-oss)."""
    fc_norm: bool = False
    """A norm for each fused state (3.1)."""
    norm_output: bool = False
    """Normed outputs stand for the next features (3.1)."""
    has_embeddings: bool = False
    has_head: bool = True
    """An LM head of its own; without it the vocabulary is whole, and the hidden size the target's."""
    attention_bias: bool = False
    """Of q, k and v."""


class FusedLayer(nn.Module):
    """A decoder layer whose queries, keys and values read embedding and feature side by side."""

    def __init__(self, family: BlockFamily, *, norm_before_residual: bool, attention_bias: bool) -> None:
        """Take a layer of `family` apart.

        Raises:
            CheckpointError: it is not made of what a layer of Llama is made of.
        """
        super().__init__()
        block: Any = family.make_layer(0)
        size = int(family.config.hidden_size)
        try:
            for name in ("q_proj", "k_proj", "v_proj"):
                narrow = getattr(block.self_attn, name)
                setattr(block.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=attention_bias))
            self.self_attn = block.self_attn
            self.mlp = block.mlp
            self.hidden_norm = family.make_norm()
            self.input_layernorm = block.input_layernorm
            self.post_attention_layernorm = block.post_attention_layernorm
        except AttributeError as error:
            raise CheckpointError(
                f"no EAGLE-3 head can be made of layers of model type {family.config.model_type!r}: {error}; "
                "those of models like llama, mistral, qwen2 and qwen3 can be used"
            ) from error
        self.norm_before_residual = norm_before_residual

    def forward(self, inputs: torch.Tensor, **keywords: Any) -> torch.Tensor:
        """Embedding and feature side by side [B, T, 2 H] -> [B, T, H]."""
        embedded, features = inputs.chunk(2, dim=-1)
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        attended, _ = self.self_attn(
            hidden_states=torch.cat([self.input_layernorm(embedded), normed], dim=-1),
            attention_mask=None,
            **keywords,
        )
        hidden: torch.Tensor = residual + attended
        mixed: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + mixed


class Eagle3(FeatureDrafter):
    """Names of modules are those of SafeAILab's tensors."""

    def __init__(
        self, target: TargetParts, settings: Eagle3Settings, vocabulary: DraftVocabulary | None = None
    ) -> None:
        super().__init__(target)
        family = block_family(settings.config, 1)
        size = int(settings.config.hidden_size)
        num_fused = len(settings.fused_layers)
        assert settings.has_embeddings or size == target.hidden_size, "the target's embeddings do not fit"
        assert not (settings.norm_before_fc and settings.fc_norm), "either norm, not both"
        assert settings.has_head or (vocabulary is None and size == target.hidden_size), "no head fits"
        self.settings = settings
        self.input_norm = (
            family.make_norm(num_fused * target.hidden_size) if settings.norm_before_fc else None
        )
        self.fc_norm = (
            nn.ModuleList(family.make_norm(target.hidden_size) for _ in range(num_fused))
            if settings.fc_norm
            else None
        )
        self.fc = nn.Linear(num_fused * target.hidden_size, size, bias=False)
        self.midlayer = FusedLayer(
            family,
            norm_before_residual=settings.norm_before_residual,
            attention_bias=settings.attention_bias,
        )
        self.norm = family.make_norm()
        self._vocabulary = vocabulary
        self.num_logits = target.vocab_size if vocabulary is None else vocabulary.size
        self.lm_head = nn.Linear(size, self.num_logits, bias=False) if settings.has_head else None
        self.embed_tokens = nn.Embedding(target.vocab_size, size) if settings.has_embeddings else None
        self.rotary = family.rotary
        self._attention_layers = probe_layers([self.midlayer], self.rotary, 2 * size, 0)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.settings.fused_layers

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        return self._vocabulary

    @property
    def attention_layers(self) -> tuple[LayerAttention, ...]:
        return self._attention_layers

    @property
    def borrowed(self) -> frozenset[Borrowed]:
        own: dict[Borrowed, nn.Module | None] = {"embeddings": self.embed_tokens, "head": self.lm_head}
        return frozenset(name for name, module in own.items() if module is None)

    @torch.no_grad()
    def start_from_target(self) -> None:
        """Start with the target's final norm, and with the rows of its LM head for the ids that are known.

        What tokens look like is then not to be learnt again. The sizes must be the target's. A norm that is
        no RMS norm is not taken: there is none like it here.
        """
        weight = self.target.head_to_start_from()
        ids = slice(None) if self._vocabulary is None else self._vocabulary.target_ids
        if self.lm_head is not None:
            self.lm_head.weight.copy_(weight[ids])
        norm = self.target.final_norm
        if type(norm) is type(self.norm):
            self.norm.load_state_dict(norm.state_dict())
        elif "RMSNorm" in type(norm).__name__:
            # Some are stored less one (Gemma's): what becomes of ones are the factors, however stored.
            own = self.norm.weight
            assert isinstance(own, torch.Tensor)
            own.copy_(norm(weight.new_ones(1, len(own)))[0])

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm is not None:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        fused: torch.Tensor = self.fc(hidden)
        return fused

    def step(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attention: Attends,
        depth: int = 0,
    ) -> FeatureStep:
        inputs = torch.cat([embedded.to(features.dtype), features], dim=-1)
        hidden = self.midlayer(inputs, position_embeddings=self.rotary(features, positions), paged=attention)
        normed = self.norm(hidden)
        return FeatureStep(normed if self.settings.norm_output else hidden, normed)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.lm_head is None:
            return self.target.logits(outputs)
        logits: torch.Tensor = self.lm_head(outputs)
        return logits
