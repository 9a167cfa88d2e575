"""What drafters with weights of their own have in common, for whoever drafts with them or trains them.

Row t of a drafter stands for position t of a sequence: it has the target's hidden state f_t, which gave token
x_{t+1}, and that token. What is drafted at depth 0 is x_{t+2}, at depth d x_{t+2+d}.

Shape letters: B rows of a batch (1 when it is flat), T positions, H hidden size of the drafter, F features of
the target side by side, V vocabulary (of the drafter, where it has one of its own).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from specdec.attention.base import LayerAttention
from specdec.core.errors import CheckpointError
from specdec.drafters.attention import Attends
from specdec.drafters.logits import LogitScaling
from specdec.drafters.vocabulary import DraftVocabulary
from specdec.model.layer_map import LayerMap

FINAL_NORM = -1
"""Stands among `hidden_layers` for the state behind the target's final norm, which its LM head reads (see
`model.hidden_taps`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    """What a drafter borrows of its target, and what it is checked against."""

    config: PretrainedConfig
    """Of the text model."""
    hidden_size: int
    vocab_size: int
    """Rows of the LM head."""
    num_layers: int
    """That do something (`model.layer_map`): hidden states are counted by these."""
    embeddings: nn.Module
    final_norm: nn.Module
    head: nn.Module
    """Its products alone: what the target says are `logits`."""
    logit_scaling: LogitScaling

    @classmethod
    def of(cls, model: PreTrainedModel) -> TargetParts:
        """Return the parts of a causal language model; nothing is copied.

        Raises:
            CheckpointError: it is not put together as those are that drafters are made for.
        """
        config = model.config.get_text_config()
        embeddings: nn.Module = model.get_input_embeddings()
        find_head: Any = model.get_output_embeddings
        head: Any = find_head()
        assert head is not None, "a causal language model has an LM head"
        # Of a model for images too, what is served is the part for text.
        get_decoder: Any = model.get_decoder
        base = get_decoder()
        norms = [
            child
            for name in ("norm", "final_layernorm", "ln_f", "final_layer_norm")
            if isinstance(child := getattr(base, name, None), nn.Module)
        ]
        if not norms:
            raise CheckpointError(
                f"no drafter can be made for a target of model type {config.model_type!r}: no norm is found "
                "behind its last layer"
            )
        return cls(
            config=config,
            hidden_size=int(config.hidden_size),
            vocab_size=int(head.out_features),  # a quantized head has no weight to ask
            num_layers=LayerMap.of_model(config).num_original_layers,
            embeddings=embeddings,
            final_norm=norms[0],
            head=head,
            logit_scaling=LogitScaling.of(config),
        )

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return what the target says, [..., V], of states behind its final norm [..., H]."""
        return self.logit_scaling(self.head(states))

    def head_to_start_from(self) -> torch.Tensor:
        """Return the weight [V, H] of a linear layer that says what the target does, but for a cap."""
        weight = self.head.weight
        assert isinstance(weight, torch.Tensor)
        slope = self.logit_scaling.slope
        return weight if slope == 1.0 else weight * slope


Borrowed = Literal["embeddings", "head"]
"""Parts of a target that a drafter may compute with, beside its final norm."""


class Drafter(nn.Module, ABC):
    """Weights that draft, beside a target, whose parts it borrows: they are no parameters of it."""

    def __init__(self, target: TargetParts) -> None:
        super().__init__()
        self.target = target

    @property
    @abstractmethod
    def hidden_layers(self) -> tuple[int, ...]:
        """What it reads of the target, side by side: i is the state after i layers (0: the embeddings).

        `FINAL_NORM` is the state behind the final norm.
        """

    @property
    @abstractmethod
    def borrowed(self) -> frozenset[Borrowed]:
        """What it computes with of the target's."""

    @property
    def max_depth(self) -> int | None:
        """Tokens that it can draft one behind another; None: any number."""
        return None

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """Which of the target's token ids it knows; None: all."""
        return None


class FeatureStep(NamedTuple):
    """What one step of drafting gives."""

    features: torch.Tensor
    """[B, T, H]: stand for the target's in the next step."""
    outputs: torch.Tensor
    """[B, T, H]: what `FeatureDrafter.logits` reads."""


class FeatureDrafter(Drafter):
    """Drafts features along with tokens, with attention of its own: EAGLE, MTP."""

    embed_tokens: nn.Embedding | None
    """Embeddings of its own; None: the target's."""

    @property
    @abstractmethod
    def attention_layers(self) -> tuple[LayerAttention, ...]:
        """Its layers with K/V of their own: what a pool is made for, and `PagedBatch.layers`."""

    @property
    def num_modules(self) -> int:
        """Modules for a depth each; the last is used again for all later ones.

        Module m has a row for every position t, which reads x_{t+1+m} and what module m - 1 made of row t,
        and attends to its own rows up to t.
        """
        return 1

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Make features [B, T, H] of the target's hidden states [B, T, F]. They are the same, by default."""
        return hidden

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [B, T, H] of the target's token ids int64 [B, T]."""
        own = self.target.embeddings if self.embed_tokens is None else self.embed_tokens
        embedded: torch.Tensor = own(token_ids)
        return embedded

    @abstractmethod
    def step(
        self,
        embedded: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        attention: Attends,
        depth: int = 0,
    ) -> FeatureStep:
        """Draft once at every row.

        Args:
            embedded: [B, T, H] of x_{t+1}; at depth d of x_{t+1+d}.
            features: [B, T, H], of `fuse` at depth 0, then those of the step before.
            positions: int64 [B, T]: t + d.
            attention: what the layers attend to, and where their K/V go.
            depth: how many tokens were drafted before, behind the same prefix.
        """

    @abstractmethod
    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] of outputs [..., H], over `vocabulary`."""


class HeadsDrafter(Drafter):
    """Has a head for every depth, over the target's states."""

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """How many heads there are."""

    @property
    def attention_layers(self) -> tuple[LayerAttention, ...]:
        """Layers with K/V that `prepare` runs."""
        return ()

    @property
    def prepared_size(self) -> int:
        """R: numbers in a row of `prepare`."""
        return len(self.hidden_layers) * self.target.hidden_size

    def prepare(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Attends) -> torch.Tensor:
        """Make what the heads read, [B, T, R], of the target's states [B, T, F].

        They are the same, by default. Every row goes through it once, because its K/V may be needed; heads
        are asked for rows to draft behind alone.
        """
        return hidden

    @abstractmethod
    def head(self, depth: int, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] of depth `depth`, given what its head reads [..., I]."""


class IndependentHeads(HeadsDrafter):
    """Every depth is drafted from the same state, whatever was drafted before: Medusa, parallel heads.

    Heads read rows of `prepare`.
    """

    def logits(self, prepared: torch.Tensor) -> torch.Tensor:
        """Return logits [num_heads, ..., V] of rows [..., R] of `prepare`; the first are of depth 0."""
        return torch.stack([self.head(depth, prepared) for depth in range(self.max_depth)])


class SequentialHeads(HeadsDrafter):
    """Every depth is drafted by a head that sees the tokens drafted before: Hydra."""

    @abstractmethod
    def inputs(self, prepared: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """Return what the head of depth `depth` reads, [..., I].

        Args:
            prepared: [..., R], of `prepare`.
            path: int64 [..., depth + 1]: x_{t+1} and the tokens drafted behind it.
        """

    def logits(self, depth: int, prepared: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] of depth `depth`; the others are as in `inputs`."""
        return self.head(depth, self.inputs(prepared, path))
