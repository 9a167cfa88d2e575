"""A checkpoint that is small enough to be looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture
def small(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    folder = tmp_path / "small"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    save_file(
        {"model.layers.3.eh_proj.weight": torch.ones(2, 2)},
        folder / "mtp.safetensors",
        metadata={"format": "pt"},
    )
    return folder
