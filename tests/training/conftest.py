"""Tiny recipes: two-digit widths, rows of a few tokens, seconds for a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from training.target import TargetRecipe


@pytest.fixture
def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )


@pytest.fixture
def tiny_documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(6, 64, size=size).astype(np.uint16) for size in (40, 150, 90, 300)]


@pytest.fixture
def tiny_recipe() -> TargetRecipe:
    return TargetRecipe(
        steps=10, batch_tokens=32, short_length=8, long_length=16, long_share=0.3, warmup_steps=2
    )


@pytest.fixture
def demo_models() -> Path:
    return Path(__file__).parents[2] / "models" / "demo"
