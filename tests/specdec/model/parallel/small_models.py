"""Small models whose widths do not divide evenly, saved or on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

TOKENS = [(7 * index) % 90 + 2 for index in range(20)]
SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 0,
}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "uneven": transformers.LlamaConfig(**SMALL),
    "one key/value head": transformers.LlamaConfig(
        **{**SMALL, "num_key_value_heads": 1}, attention_bias=True
    ),
    "mixtral": transformers.MixtralConfig(
        **{**SMALL, "intermediate_size": 64}, num_local_experts=4, num_experts_per_tok=2
    ),
    "starcoder2": transformers.Starcoder2Config(**SMALL),
    "gemma3": transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=8, query_pre_attn_scalar=8),
    "olmo": transformers.OlmoConfig(**SMALL),
    "phi": transformers.PhiConfig(**SMALL),
    "cohere": transformers.CohereConfig(**SMALL, use_qk_norm=True, logit_scale=1.0),
    "nemotron": transformers.NemotronConfig(**SMALL, head_dim=8),
}


def save(folder: Path, config: transformers.PretrainedConfig) -> Path:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_matrix = parameter.dim() > 1 and "norm" not in name
            parameter.mul_(3.0) if is_matrix else parameter.add_(torch.randn_like(parameter) / 10)
    model.save_pretrained(folder)
    return folder


def on_paper(config: transformers.PretrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model
