"""Tiny random models of many architectures, saved as ordinary model folders, and a tiny tokenizer.

Everything is seeded. Weights are drawn wider than transformers' own initialisation, so that attention is
peaked and logits differ enough for greedy decoding to be a real comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

VOCAB_SIZE = 128
MAX_POSITIONS = 256
EOS_TOKEN_ID = 0

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _llama() -> PretrainedConfig:
    return transformers.LlamaConfig(**_COMMON)


def _llama_tied() -> PretrainedConfig:
    return transformers.LlamaConfig(**{**_COMMON, "tie_word_embeddings": True})


def _llama3_rope() -> PretrainedConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return transformers.LlamaConfig(**_COMMON, rope_parameters=rope)


def _qwen3() -> PretrainedConfig:
    return transformers.Qwen3Config(**_COMMON, head_dim=16)


def _qwen2() -> PretrainedConfig:
    return transformers.Qwen2Config(**_COMMON)


def _mistral() -> PretrainedConfig:
    return transformers.MistralConfig(**_COMMON, sliding_window=12)


def _gpt_neox() -> PretrainedConfig:
    common = {name: value for name, value in _COMMON.items() if name != "num_key_value_heads"}
    return transformers.GPTNeoXConfig(**common, rotary_pct=0.25)


def _gpt2() -> PretrainedConfig:
    return transformers.GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=MAX_POSITIONS,
        eos_token_id=EOS_TOKEN_ID,
        bos_token_id=1,
    )


def _olmo2() -> PretrainedConfig:
    return transformers.Olmo2Config(**_COMMON)


def _gemma2() -> PretrainedConfig:
    return transformers.Gemma2Config(**_COMMON, head_dim=16, sliding_window=12, query_pre_attn_scalar=16)


def _granite() -> PretrainedConfig:
    return transformers.GraniteConfig(**_COMMON, logits_scaling=4.0, attention_multiplier=0.5)


def _cohere2() -> PretrainedConfig:
    return transformers.Cohere2Config(**{**_COMMON, "tie_word_embeddings": True}, sliding_window=12)


def _gemma3() -> PretrainedConfig:
    return transformers.Gemma3TextConfig(
        **{**_COMMON, "num_hidden_layers": 4, "tie_word_embeddings": True},
        head_dim=16,
        sliding_window=12,
        sliding_window_pattern=2,
        query_pre_attn_scalar=16,
    )


def _gemma3_with_images() -> PretrainedConfig:
    """Served for text alone."""
    text = {**_gemma3().to_dict(), "vocab_size": VOCAB_SIZE}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        image_token_index=125,
        boi_token_index=126,
        eoi_token_index=127,
        mm_tokens_per_image=4,
        eos_token_id=EOS_TOKEN_ID,
    )


def _starcoder2() -> PretrainedConfig:
    return transformers.Starcoder2Config(**_COMMON, sliding_window=12, use_sliding_window=True)


def _phi3() -> PretrainedConfig:
    return transformers.Phi3Config(**_COMMON)


ORIGINAL_POSITIONS = 32
"""Length at which the models below take other rotary frequencies."""


def _phi3_longrope() -> PretrainedConfig:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 6.0],
    }
    return transformers.Phi3Config(
        **_COMMON, original_max_position_embeddings=ORIGINAL_POSITIONS, rope_parameters=rope
    )


def _llama_dynamic_ntk() -> PretrainedConfig:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return transformers.LlamaConfig(
        **{**_COMMON, "max_position_embeddings": ORIGINAL_POSITIONS}, rope_parameters=rope
    )


def _llama_linear_rope() -> PretrainedConfig:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    return transformers.LlamaConfig(**_COMMON, rope_parameters=rope)


def _llama_yarn() -> PretrainedConfig:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return transformers.LlamaConfig(**_COMMON, rope_parameters=rope)


def _mixtral() -> PretrainedConfig:
    return transformers.MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2)


def _qwen2_moe() -> PretrainedConfig:
    # transformers has the window of these layers in their masks alone.
    return transformers.Qwen2MoeConfig(
        **_COMMON,
        use_sliding_window=True,
        sliding_window=12,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
    )


def _qwen3_moe() -> PretrainedConfig:
    return transformers.Qwen3MoeConfig(
        **_COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )


_FALCON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "alibi": False,
}


def _falcon() -> PretrainedConfig:
    return transformers.FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2)


def _falcon_multi_query() -> PretrainedConfig:
    return transformers.FalconConfig(**_FALCON, multi_query=True, parallel_attn=True)


def _falcon_multi_head() -> PretrainedConfig:
    return transformers.FalconConfig(**_FALCON, multi_query=False, parallel_attn=False, bias=True)


ARCHITECTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _llama,
    "llama_tied": _llama_tied,
    "llama3_rope": _llama3_rope,
    "qwen3": _qwen3,
    "qwen2": _qwen2,
    "mistral": _mistral,
    "gpt_neox": _gpt_neox,
    "gpt2": _gpt2,
    "olmo2": _olmo2,
    "gemma2": _gemma2,
    "granite": _granite,
    "cohere2": _cohere2,
    "gemma3": _gemma3,
    "gemma3_with_images": _gemma3_with_images,
    "phi3": _phi3,
    "phi3_longrope": _phi3_longrope,
    "llama_dynamic_ntk": _llama_dynamic_ntk,
    "llama_linear_rope": _llama_linear_rope,
    "llama_yarn": _llama_yarn,
    "starcoder2": _starcoder2,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "falcon": _falcon,
    "falcon_multi_query": _falcon_multi_query,
    "falcon_multi_head": _falcon_multi_head,
}
"""Configurations by name. `CORE_ARCHITECTURES` are those that everybody tests with."""

CORE_ARCHITECTURES = ("llama", "qwen3", "mistral", "gpt_neox")
OTHER_ARCHITECTURES = tuple(name for name in ARCHITECTURES if name not in CORE_ARCHITECTURES)
LOWERED = tuple(ARCHITECTURES)
"""Whose forward is compiled: all of them (docs/models.md says so)."""
POSITIONS_OF_OTHER_KINDS = ("phi3_longrope", "llama_dynamic_ntk", "gemma2", "gemma3", "gpt2", "cohere2")
"""Tables by length, windows of some layers, learned positions."""
VARIED_ARCHITECTURES = (
    "llama",
    "gpt2",  # learned positions, biases, transposed weights, layer norms
    "gemma2",  # logits and scores are capped, windows in some layers
    "gemma3",  # two rotary tables, normed queries and keys
    "mixtral",  # experts
    "olmo2",  # norms behind what they norm
    "phi3_longrope",  # rotary tables by length
    "falcon",  # one matrix for queries and few keys and values; attention and MLP side by side
)
"""Few in which whatever architectures differ in occurs: for what is costly and depends little on them."""


def with_layers(config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Return the same configuration with so many layers; which of them have windows is up to its class."""
    values = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    text_config = config.get_text_config()
    if text_config is not config:
        return type(config)(**{**values, "text_config": with_layers(text_config, num_layers).to_dict()})
    return type(config)(**{**values, "n_layer" if "n_layer" in values else "num_hidden_layers": num_layers})


def make_model(
    architecture: str, seed: int = 0, spread: float = 3.0, num_layers: int | None = None
) -> transformers.PreTrainedModel:
    """Return a random fp32 model in evaluation mode, with eager attention."""
    torch.manual_seed(seed)
    config = ARCHITECTURES[architecture]()
    if num_layers is not None:
        config = with_layers(config, num_layers)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(spread)
    return model.eval()


def save_model(
    folder: Path, architecture: str = "llama", seed: int = 0, num_layers: int | None = None
) -> transformers.PreTrainedModel:
    """Save `make_model` with the tiny tokenizer as a model folder, and return it."""
    model = make_model(architecture, seed, num_layers=num_layers)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return model


def save_wide_model(folder: Path) -> None:
    """Save a bf16 Llama with sums so long that PyTorch cuts some of them, where rows are few."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        eos_token_id=EOS_TOKEN_ID,
        bos_token_id=1,
        initializer_range=0.04,
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def make_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `vocab_size` ids: <eos>, <bos>, single characters, then pairs."""
    characters = [chr(code) for code in range(32, 127)]
    pairs = [first + second for first in "etaoins" for second in "etaoins"]
    tokens = ["<eos>", "<bos>", *characters, *pairs][:vocab_size]
    core = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", bos_token="<bos>")
