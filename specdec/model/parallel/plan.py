"""How each module of a model is cut over ranks: the model's own `tp_plan`, or a small one declared here.

A plan maps module (or parameter) names, `*` for numbers, to styles. transformers publishes plans for most
models; its styles are documented with `distributed/tensor_parallel.py` there. Ours cover models that publish
none (GPT-2, Falcon), and models whose published plan computes attention on every rank in full because its
projections are fused (Phi-3) or its norms span all heads (OLMo-2), or leaves norms whole of which each head
has its own (Command R): they add the styles

    fused_qkv        output rows [all queries | all keys | all values]
    falcon_qkv       output rows as Falcon's three generations of checkpoints have them
    norm_over_heads  a norm over all heads: runs on the gathered input, of which each rank keeps its part
    norm_per_head    a norm of each head with weights of its own, [heads, head size]: cut by heads (Command R)

Whatever a plan says of it, the head is cut by vocabulary and its output is not gathered: the sampler takes
the shards (`sampling.parallel`). Tied embeddings are cut with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from specdec.model.layer_values import layer_values

STYLES = frozenset(
    {
        "colwise",
        "colwise_gather_output",
        "packed_colwise",
        "rowwise",
        "rowwise_split_input",
        "packed_rowwise",
        "embedding_rowwise",
        "moe_tp_experts",
        "replicated_with_grad_allreduce",
        "fused_qkv",
        "falcon_qkv",
        "norm_over_heads",
        "norm_per_head",
    }
)
"""What `cuts` and `surgery` know."""

_DECLARED: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "transformer.wte": "embedding_rowwise",
        "transformer.h.*.attn.c_attn": "fused_qkv",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    },
    "falcon": {
        "transformer.word_embeddings": "embedding_rowwise",
        "transformer.h.*.self_attention.query_key_value": "falcon_qkv",
        "transformer.h.*.self_attention.dense": "rowwise",
        "transformer.h.*.mlp.dense_h_to_4h": "colwise",
        "transformer.h.*.mlp.dense_4h_to_h": "rowwise",
    },
    "phi3": {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.qkv_proj": "fused_qkv",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_up_proj": "packed_colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
    "olmo2": {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.q_norm": "norm_over_heads",
        "model.layers.*.self_attn.k_norm": "norm_over_heads",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
    "cohere": {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.q_norm": "norm_per_head",
        "model.layers.*.self_attn.k_norm": "norm_per_head",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
}
"""Plans of ours by model type; they replace published ones."""

_HEADWISE = frozenset({"q_proj", "k_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn"})
"""Last part of the names of projections whose output is attention heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """Attention heads of a model, and those of one rank."""

    num_heads: int
    num_kv_heads: int
    rank: int
    size: int

    @property
    def local_heads(self) -> range:
        """Query heads of this rank."""
        share = self.num_heads // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    @property
    def local_kv_heads(self) -> range:
        """Key/value heads that this rank's query heads attend with; with fewer heads than ranks, copies."""
        if self.num_kv_heads >= self.size:
            share = self.num_kv_heads // self.size
            return range(self.rank * share, (self.rank + 1) * share)
        first = self.rank * self.num_kv_heads // self.size
        return range(first, first + 1)

    @property
    def kv_copies(self) -> int:
        """How many ranks hold the same key/value head."""
        return max(1, self.size // self.num_kv_heads)


class UnsupportedParallelism(Exception):
    """The text says why this model cannot be cut over so many ranks."""


def layout_of(config: PretrainedConfig, rank: int, size: int) -> HeadLayout:
    """Return the head layout that a configuration describes.

    Raises:
        UnsupportedParallelism: its layers have different ones.
    """
    text_config: Any = config.get_text_config()
    num_heads = _of_all_layers(text_config, "num_attention_heads")
    assert num_heads is not None, "every configuration that has a plan states it"
    kv_heads = _of_all_layers(text_config, "num_key_value_heads")
    if text_config.model_type == "falcon":
        kv_heads = _falcon_kv_heads(text_config)
    return HeadLayout(num_heads=num_heads, num_kv_heads=kv_heads or num_heads, rank=rank, size=size)


def _of_all_layers(text_config: Any, name: str) -> int | None:
    values = layer_values(text_config, name)
    if len(values) > 1:
        raise UnsupportedParallelism(
            f"its layers have different numbers of heads ({name} is {' and '.join(map(str, values))}), which "
            "are not divided yet"
        )
    return int(values[0]) if values else None


def _falcon_kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def plan_of(model: torch.nn.Module, size: int) -> Mapping[str, str]:
    """Return the plan of a model on the meta device.

    Raises:
        UnsupportedParallelism: it has none, one with styles that we do not know, or heads that do not divide.
    """
    config: Any = model.config
    model_type = config.get_text_config().model_type
    published: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    plan = _DECLARED.get(model_type, published)
    matched = {name: plan[generic_name(name)] for name, _ in _parts(model) if generic_name(name) in plan}
    if not any(style.startswith("rowwise") for style in matched.values()):
        raise UnsupportedParallelism("transformers publishes no tp_plan for it, and none is declared here")
    unknown = {name: style for name, style in matched.items() if style not in STYLES}
    if unknown:
        name, style = next(iter(unknown.items()))
        raise UnsupportedParallelism(
            f"its tp_plan cuts {name} in the style {style!r}, which is not supported"
        )
    if any(style in _CUTS_HEADS and name.rsplit(".", 1)[-1] in _HEADWISE for name, style in matched.items()):
        _require_divisible_heads(layout_of(config, 0, size))
    return matched


_CUTS_HEADS = frozenset({"colwise", "fused_qkv", "falcon_qkv"})


def _require_divisible_heads(layout: HeadLayout) -> None:
    size = layout.size
    if layout.num_heads % size:
        raise UnsupportedParallelism(
            f"its {layout.num_heads} attention heads cannot be divided over {size} ranks"
        )
    if layout.num_kv_heads % size and size % layout.num_kv_heads:
        raise UnsupportedParallelism(
            f"its {layout.num_kv_heads} key/value heads can neither be divided over {size} ranks nor "
            "copied evenly to them"
        )


def generic_name(name: str) -> str:
    """Return a module's name with `*` for the numbers of layers and experts."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _parts(model: torch.nn.Module) -> list[tuple[str, object]]:
    return [*model.named_modules(), *model.named_parameters()]
