"""Checkpoints of realistic proportions with random weights and the demo's tokenizer.

For what is measured where the text does not matter: the demo models made deeper (`benchmarks.inflate`) keep
their text, but their layers stay as narrow as they are, and what is done per layer and row weighs more in
them than in models that people run.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama's; heads have 64 dimensions."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_kv_heads: int


WIDE = Shape(hidden_size=1024, intermediate_size=2816, num_layers=8, num_kv_heads=8)
"""About 100 million parameters."""


def write_random_model(demo: Path, folder: Path, shape: Shape) -> int:
    """Write a checkpoint in bf16 with the tokenizer of `demo`; return how many parameters it has."""
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.hidden_size // 64,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in demo.iterdir():
        if "token" in file.name or "template" in file.name:
            shutil.copy(file, folder / file.name)
    return sum(parameter.numel() for parameter in model.parameters())
