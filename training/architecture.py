"""The shape that the demo models share: a small Llama."""

from __future__ import annotations

from transformers import LlamaConfig

from training.tokenizer import CONTEXT_LENGTH, PAD_ID, SEPARATOR_ID, VOCAB_SIZE


def demo_llama(
    *, hidden_size: int, num_layers: int, num_heads: int, num_kv_heads: int, intermediate_size: int
) -> LlamaConfig:
    """Return the configuration of a demo model; heads have 64 dimensions, embeddings and head are tied."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        intermediate_size=intermediate_size,
        max_position_embeddings=CONTEXT_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=SEPARATOR_ID,
        eos_token_id=SEPARATOR_ID,
        pad_token_id=PAD_ID,
        initializer_range=0.02,
    )
