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
from specdec.drafters.attention import CausalRows, RowAttention, UnrolledRows
from specdec.drafters.base import TargetParts
from specdec.drafters.blocks import block_family
from specdec.drafters.eagle import Eagle
from specdec.drafters.mtp import Mtp
from specdec.drafters.parallel_heads import ParallelHeads
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


@pytest.mark.parametrize("last", [0, 1])
def test_what_a_configuration_says_of_each_layer_goes_on_as_for_the_last(last: int) -> None:
    config = transformers.SmolLM3Config(**SIZES, no_rope_layers=[1 - last] * (LAYERS - 1) + [last])
    modules = modules_for(config)
    assert [bool(module.block.self_attn.use_rope) for module in modules.mtp_modules] == [bool(last)] * 2
    assert len(config.no_rope_layers) == LAYERS  # the target's own stays as it is
    assert len(ParallelHeads(modules.target, num_heads=2).extra_heads) == 2


def test_a_layer_that_is_not_made_so_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    family = block_family(tiny_config(), LAYERS + 1)

    def broken(*args: object, **options: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(family.layer, "__init__", broken)
    with pytest.raises(CheckpointError, match="of decoder layers of model type 'llama': list index out of"):
        family.make_layer(LAYERS)


@pytest.mark.parametrize("rows", [CausalRows, UnrolledRows])
@torch.no_grad()
def test_rows_longer_than_a_window_by_the_kind_of_layer_are_refused(rows: type[RowAttention]) -> None:
    """Llama's code knows no window, which is what such a drafter is served with."""
    target = TargetParts.of(AutoModelForCausalLM.from_config(tiny_config()))
    windowed = tiny_config(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=4)
    drafter = Eagle(target, windowed)
    assert [layer.sliding_window for layer in drafter.attention_layers] == [4]
    hidden, positions = torch.randn(1, 6, HIDDEN), torch.arange(6)[None]
    drafter.step(hidden[:, :4], hidden[:, :4], positions[:, :4], rows())
    with pytest.raises(UnsupportedAttention, match="6 positions are longer than the sliding window of 4"):
        drafter.step(hidden, hidden, positions, rows())


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
        (transformers.NanoChatConfig(**SIZES), "no drafter can be made of norms of model type 'nanochat'"),
        (transformers.LagunaConfig(**SIZES, head_dim=8), "decoder layers with LagunaRotaryEmbedding"),
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
