"""Tiny drafters in the published layouts, written name by name: savers of the project have no part in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

MODEL = "model.safetensors"
VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 48, 16, 24, 4, 2, 8, 4
KNOWN_IDS = (3, 5, 6, 11, 30, 47)

LAYER_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}

Tensors = dict[str, torch.Tensor]


def filled(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    """Random tensors; norms around one."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1 + 0.3 * x if x.ndim == 1 else 0.3 * x for name, x in drawn.items()}


def layer_shapes(
    prefix: str, *, inputs: int = HIDDEN, has_input_norm: bool = True
) -> dict[str, tuple[int, ...]]:
    """Of a Llama decoder layer whose q, k and v read `inputs` features."""
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, inputs),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    if has_input_norm:
        shapes["input_layernorm.weight"] = (HIDDEN,)
    return {prefix + name: shape for name, shape in shapes.items()}


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], file: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(dict(tensors), folder / file)
    return folder


def medusa(
    num_heads: int = 3, num_layers: int = 1, prefix: str = "", *, has_lm_heads: bool = True
) -> tuple[dict[str, Any], Tensors]:
    """Heads with LM heads of their own, or as their authors train them now, without."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            shapes[f"{prefix}{head}.{layer}.linear.weight"] = (HIDDEN, HIDDEN)
            shapes[f"{prefix}{head}.{layer}.linear.bias"] = (HIDDEN,)
        if has_lm_heads:
            shapes[f"{prefix}{head}.{num_layers}.weight"] = (VOCAB, HIDDEN)
    config = {
        "base_model_name_or_path": "somebody/some-model",
        "medusa_num_heads": num_heads,
        "medusa_num_layers": num_layers,
        "transformers_version": "4.34.1",
    }
    if not has_lm_heads:
        config["version"] = "2"
    return config, filled(shapes)


def medusa_for_vllm(num_heads: int = 3, num_layers: int = 1) -> tuple[dict[str, Any], Tensors]:
    """Return the heads of `medusa`, converted: with biases, which vLLM's own conversion leaves out."""
    tensors = {}
    for name, tensor in medusa(num_heads, num_layers)[1].items():
        head, layer, *rest = name.split(".")
        place = f"blocks.{head}.layers.{layer}.{rest[-1]}" if "linear" in rest else f"lm_heads.{head}.weight"
        tensors[place] = tensor
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "truncated_vocab_size": VOCAB,
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "medusa_fc_bias": True,
        "max_paths": 64,
        "topk": 10,
    }
    return config, tensors


def hydra(
    num_heads: int = 3, num_layers: int = 2, *, is_grounded: bool = True, has_prefix_layer: bool = False
) -> tuple[dict[str, Any], Tensors]:
    shapes: dict[str, tuple[int, ...]] = {"input_embed_fn.weight": (VOCAB, HIDDEN)}
    for head in range(num_heads):
        first = (head + 2) * HIDDEN if is_grounded else HIDDEN
        for layer in range(num_layers):
            place = 2 * layer + 1 if has_prefix_layer else layer
            inputs = first if layer == 0 else HIDDEN
            shapes[f"hydra_mlp.{head}.{place}.linear.weight"] = (HIDDEN, inputs)
            shapes[f"hydra_mlp.{head}.{place}.linear.bias"] = (HIDDEN,)
            if inputs != HIDDEN:
                shapes[f"hydra_mlp.{head}.{place}.res_connection.weight"] = (HIDDEN, inputs)
                shapes[f"hydra_mlp.{head}.{place}.res_connection.bias"] = (HIDDEN,)
        name = f"hydra_lm_head.{head}.1" if has_prefix_layer else f"hydra_lm_head.{head}"
        shapes[f"{name}.weight"] = (VOCAB, HIDDEN)
        shapes[f"{name}.bias"] = (VOCAB,)
    if has_prefix_layer:
        shapes |= layer_shapes("prefix_embeding_layer.layers.0.")
        shapes["prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"] = (HEAD_DIM // 2,)
        shapes["prefix_embeding_layer.norm.weight"] = (HIDDEN,)
        shapes["prefix_embeding_layer.embed_tokens.weight"] = (VOCAB, HIDDEN)
    config = {
        "base_model_name_or_path": "somebody/some-model",
        "hydra_num_heads": num_heads,
        "hydra_num_layers": num_layers,
        "hydra_head_arch": "prefix-mlp" if has_prefix_layer else "mlp",
        "grounded_heads": is_grounded,
        "hidden_state_offset": 0,
    }
    return config, filled(shapes)


def hydra_eagle_attention() -> tuple[dict[str, Any], Tensors]:
    """Return Hydra's `eagle-attn`: of EAGLE's names, without its sizes in config.json."""
    shapes = layer_shapes("attn.")
    shapes |= {"fc.weight": (HIDDEN, 2 * HIDDEN), "fc.bias": (HIDDEN,)}
    shapes |= {"input_embed_fn.weight": (VOCAB, HIDDEN), "hydra_lm_head.weight": (VOCAB, HIDDEN)}
    config, _ = hydra(1, 1)
    return config | {"hydra_head_arch": "eagle-attn"}, filled(shapes)


def eagle(*, has_bias: bool = True, prefix: str = "") -> tuple[dict[str, Any], Tensors]:
    shapes = layer_shapes("layers.0.", has_input_norm=False)
    shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    shapes["fc.weight"] = (HIDDEN, 2 * HIDDEN)
    if has_bias:
        shapes["fc.bias"] = (HIDDEN,)
    config = {**LAYER_CONFIG, "architectures": ["LlamaForCausalLM"], "bias": has_bias}
    return config, filled({prefix + name: shape for name, shape in shapes.items()})


def eagle3(
    *, layer: str = "midlayer.", prefix: str = "", fc_norm: bool = False
) -> tuple[dict[str, Any], Tensors]:
    shapes = layer_shapes(layer, inputs=2 * HIDDEN)
    shapes[f"{layer}hidden_norm.weight"] = (HIDDEN,)
    shapes["fc.weight"] = (HIDDEN, 3 * HIDDEN)
    shapes["norm.weight"] = (HIDDEN,)
    if fc_norm:
        shapes |= {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}
    tensors = filled({prefix + name: shape for name, shape in shapes.items()})
    tensors |= filled({"lm_head.weight": (len(KNOWN_IDS), HIDDEN)}, seed=1)
    known = torch.tensor(KNOWN_IDS)
    tensors["d2t"] = known - torch.arange(len(KNOWN_IDS))
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, known, True)
    config = {
        **LAYER_CONFIG,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(KNOWN_IDS),
        "norm_before_residual": False,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 0, 2]},
    }
    return config, tensors


def speculators_eagle3() -> tuple[dict[str, Any], Tensors]:
    top, tensors = eagle3(layer="layers.0.")
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "draft_vocab_size": top["draft_vocab_size"],
        "target_hidden_size": None,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": [2, 1, 3],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "somebody/some-model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": LAYER_CONFIG,
    }
    return config, tensors


def mtp_deepseek(num_modules: int = 1) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS, LAYERS + num_modules):
        name = f"model.layers.{layer}."
        shapes |= layer_shapes(name)
        shapes |= {f"{name}{part}.weight": (HIDDEN,) for part in ("enorm", "hnorm", "shared_head.norm")}
        shapes[f"{name}eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    return filled(shapes)


def mtp_qwen() -> Tensors:
    shapes = layer_shapes("mtp.layers.0.")
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    shapes |= {f"mtp.{name}.weight": (HIDDEN,) for name in norms}
    shapes["mtp.fc.weight"] = (HIDDEN, 2 * HIDDEN)
    return filled(shapes)


def mtp_mimo(num_modules: int = 1) -> Tensors:
    """Layers are those of Qwen 2, with biases."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(num_modules):
        name = f"model.mtp_layers.{index}."
        shapes |= layer_shapes(name)
        shapes |= {f"{name}self_attn.{part}_proj.bias": (KV_HEADS * HEAD_DIM,) for part in "kv"}
        shapes[f"{name}self_attn.q_proj.bias"] = (HEADS * HEAD_DIM,)
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        shapes |= {f"{name}{norm}.weight": (HIDDEN,) for norm in norms}
        shapes[f"{name}input_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    return filled(shapes)


def speculators_mtp() -> tuple[dict[str, Any], Tensors]:
    shapes = layer_shapes("mtp_layers.0.")
    shapes |= {f"mtp_layers.0.self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
    shapes |= {
        f"mtp_layers.0.{name}.weight": (HIDDEN,)
        for name in ("hidden_layernorm", "token_layernorm", "final_layernorm")
    }
    shapes["mtp_layers.0.input_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.5.0",
        "num_nextn_predict_layers": 1,
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "somebody/some-model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {**LAYER_CONFIG, "model_type": "qwen3", "num_hidden_layers": LAYERS},
    }
    return config, filled(shapes)


def parallel_heads() -> tuple[dict[str, Any], Tensors]:
    shapes = layer_shapes("extra_heads.0.") | layer_shapes("extra_heads.1.")
    config = {
        "model_type": "parallel_heads",
        "n_future_tokens": 3,
        "base_model_name_or_path": "somebody/some-model",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
    }
    return config, filled(shapes)


def whole_target(
    folder: Path, model: PreTrainedModel, extra: dict[str, torch.Tensor], file: str = MODEL
) -> None:
    """Write the target's own checkpoint, with `extra` in its file or in one beside it."""
    model.save_pretrained(folder)  # type: ignore[no-untyped-call]
    if file == MODEL:
        extra = load_file(folder / MODEL) | extra
    save_file(extra, folder / file, metadata={"format": "pt"})
