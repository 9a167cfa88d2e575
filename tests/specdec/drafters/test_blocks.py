"""Decoder layers of other kinds of models than Llama."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from specdec.attention.hf import UnsupportedAttention
from specdec.core.errors import CheckpointError
from specdec.drafters.attention import CausalRows
from specdec.drafters.base import TargetParts
from specdec.drafters.blocks import block_family
from specdec.drafters.mtp import Mtp
from tests.specdec.drafters.conftest import HIDDEN, LAYERS, VOCAB, tiny_config

SIZES: dict[str, Any] = {
    name: getattr(tiny_config(), name)
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
}


def modules_for(config: transformers.PretrainedConfig) -> Mtp:
    target = TargetParts.of(AutoModelForCausalLM.from_config(config))
    return Mtp(target, num_modules=2)


@pytest.mark.parametrize("kind", ["Qwen2Config", "Qwen3Config", "Olmo2Config", "MistralConfig"])
@torch.no_grad()
def test_modules_of_the_targets_own_kind(kind: str) -> None:
    modules = modules_for(getattr(transformers, kind)(**SIZES))
    tokens = torch.arange(2, 8)[None]
    step = modules.step(modules.embed(tokens), torch.randn(1, 6, HIDDEN), tokens, CausalRows(), depth=1)
    assert modules.logits(step.outputs).shape == (1, 6, VOCAB)
    assert [layer.layer_idx for layer in modules.attention_layers] == [LAYERS, LAYERS + 1]


@torch.no_grad()
def test_rows_longer_than_a_window_are_refused() -> None:
    modules = modules_for(transformers.MistralConfig(**SIZES, sliding_window=4))
    tokens = torch.arange(2, 8)[None]
    with pytest.raises(UnsupportedAttention, match="6 positions are longer than the sliding window of 4"):
        modules.step(modules.embed(tokens), torch.randn(1, 6, HIDDEN), tokens, CausalRows())


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=48), "model type 'gpt2'"),
        (
            transformers.DeepseekV3Config(
                **{**SIZES, "num_key_value_heads": 4},
                q_lora_rank=8,
                kv_lora_rank=8,
                qk_nope_head_dim=8,
                qk_rope_head_dim=8,
                v_head_dim=8,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                moe_intermediate_size=16,
            ),
            "attention is not supported",
        ),
    ],
)
def test_kinds_that_cannot_be_used_are_named(config: transformers.PretrainedConfig, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        modules_for(config)


LENGTH_DEPENDENT: dict[str, transformers.PretrainedConfig] = {
    "longrope": transformers.Phi3Config(
        **SIZES,
        original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.2],
            "long_factor": [2.0, 6.0],
        },
    ),
    "dynamic": transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
}


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT)
def test_a_long_text_changes_nobody_elses_drafts(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A batch is flat: the farthest position of all must not choose the frequencies of each."""
    with caplog.at_level(logging.INFO, "specdec.drafters.blocks"):
        rotary = block_family(LENGTH_DEPENDENT[kind], 1).rotary
    assert f"rope_type {kind}: frequencies of drafters' layers do not depend on" in caplog.text
    x = torch.zeros(1)
    short = torch.tensor([[0, 1, 2]])
    before = rotary(x, short)
    together = rotary(x, torch.tensor([[0, 1, 2, 5000]]))
    alone = rotary(x, torch.tensor([[0, 5000]]))
    after = rotary(x, short)
    for first, beside, far, then in zip(before, together, alone, after, strict=True):
        assert torch.equal(first, then)
        assert torch.equal(first, beside[:, :3])
        assert torch.equal(beside[:, -1], far[:, -1])


def test_layers_behind_the_last_are_of_its_kind() -> None:
    """Some configurations have an entry for each layer, and modules are none of these."""
    config = transformers.ExaoneMoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        n_group=1,
        topk_group=1,
        mlp_layer_types=["dense"] + ["sparse"] * (LAYERS - 1),
        layer_types=["full_attention"] * LAYERS,
    )
    modules = modules_for(config)
    assert any("mlp.experts.down_proj" in name for name in modules.state_dict())
