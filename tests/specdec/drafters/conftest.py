"""A tiny target, and rows of its tokens and hidden states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from specdec.drafters.base import FINAL_NORM, TargetParts

VOCAB, HIDDEN, LAYERS = 48, 16, 4


def tiny_config(**changes: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
    }
    return LlamaConfig(**(settings | changes))


def randomize(module: torch.nn.Module, seed: int) -> None:
    """Draw every parameter, norms around one, so that nothing is the identity by chance."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * drawn if parameter.ndim == 1 else 0.3 * drawn)


class Target(NamedTuple):
    model: PreTrainedModel
    parts: TargetParts

    def hidden(self, tokens: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
        """States [B, T, sum of sizes] of int64 [B, T], side by side."""
        with torch.no_grad():
            states = self.model(tokens, output_hidden_states=True).hidden_states
        assert all(layer == FINAL_NORM or layer < LAYERS for layer in layers)
        return torch.cat([states[-1 if layer == FINAL_NORM else layer] for layer in layers], dim=-1)


@pytest.fixture
def make_target() -> Callable[..., Target]:
    def make(**changes: Any) -> Target:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(**changes))
        randomize(model, seed=1)
        return Target(model.eval(), TargetParts.of(model))

    return make


@pytest.fixture
def target(make_target: Callable[..., Target]) -> Target:
    return make_target()


@pytest.fixture
def tokens() -> torch.Tensor:
    """int64 [2, 9]."""
    return torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "drafter"
    made.mkdir()
    return made
