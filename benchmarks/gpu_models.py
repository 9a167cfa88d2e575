"""Models of well-known shapes with random weights, made on the device: nothing is read from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.attention.hf import ATTENTION_NAME
from specdec.model.inspection import inspect_forward
from specdec.model.loader import LoadedModel

GIB = 1 << 30
LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=32768,
    tie_word_embeddings=False,
)
LLAMA_1B = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=32768,
    tie_word_embeddings=True,
)


def random_model(
    config: LlamaConfig,
    device: torch.device,
    *,
    max_model_len: int,
    dtype: torch.dtype = torch.bfloat16,
) -> LoadedModel:
    """Return a model of this shape, as the loader returns one that it has read."""
    torch.manual_seed(0)
    make: Any = LlamaForCausalLM._from_config
    with device:
        model = make(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    model.eval().requires_grad_(False)
    path = Path(f"llama-random-{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.1f}b")
    layers, vocab_size = inspect_forward(model, path)
    return LoadedModel(
        path=path,
        model=model,
        config=config,
        dtype=dtype,
        device=device,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=(),
        revision="random",
        layers=layers,
    )
