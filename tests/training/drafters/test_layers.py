"""Decoder layers of new drafters, for targets of many families."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma4TextConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from specdec.core.errors import ConfigError
from specdec.drafters.base import FeatureDrafter, TargetParts
from specdec.drafters.checkpoints.registry import load_drafter
from specdec.drafters.eagle3 import Eagle3
from tests.architectures import VOCAB_SIZE, make_model, save_model
from tests.training.drafters.tiny_runs import TINY, options
from training.drafters.layers import llama_layers
from training.drafters.methods import make_training
from training.drafters.recipe import DrafterRecipe, Method
from training.drafters.train import train_drafter

COUNTS = torch.zeros(VOCAB_SIZE, dtype=torch.int64)
OTHERS = ["qwen2", "qwen3", "olmo2", "phi3"]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    "architecture",
    [*OTHERS, *(pytest.param(one, marks=pytest.mark.full) for one in ("gemma3", "granite", "mixtral"))],
)
def test_heads_for_other_families_are_llamas(
    architecture: str, method: Method, texts: Path, tmp_path: Path
) -> None:
    """As they are published; what is written loads."""
    target = tmp_path / "target"
    save_model(target, architecture)
    chosen = options(target, texts, tmp_path, eval_texts=0)
    train_drafter(DrafterRecipe(method=method, **(TINY | {"steps": 1})), chosen)
    config = json.loads((chosen.out / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 1)
    parts_of_layer = {
        name.removeprefix("layers.0.").removeprefix("midlayer.")
        for name in load_file(chosen.out / "model.safetensors")
        if name.startswith(("layers.0.", "midlayer."))
    }
    assert parts_of_layer == {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "post_attention_layernorm.weight",
        *(("hidden_norm.weight", "input_layernorm.weight") if method == "eagle3" else ()),
    }
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    drafter = load_drafter(chosen.out, TargetParts.of(model))
    assert type(drafter).__name__.lower() == method
    (attention,) = drafter.attention_layers
    stated: Any = model.config.get_text_config()
    assert attention.num_heads == stated.num_attention_heads
    assert attention.num_kv_heads == stated.num_key_value_heads


def test_sizes_are_the_targets() -> None:
    qwen = TargetParts.of(make_model("qwen3"))
    config: Any = llama_layers(qwen, 2)
    assert (config.num_hidden_layers, config.head_dim, config.vocab_size) == (2, 16, VOCAB_SIZE)
    assert (config.intermediate_size, config.rms_norm_eps) == (64, qwen.config.rms_norm_eps)
    assert config.rope_parameters == qwen.config.rope_parameters
    assert config.attention_bias is False


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_sizes_that_differ_by_layer_are_the_first_ones(method: Method) -> None:
    """Gemma 4's layers that attend to everything have larger heads, and its configuration names none."""
    config = Gemma4TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        max_position_embeddings=64,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        pad_token_id=0,
    )
    parts = TargetParts.of(AutoModelForCausalLM.from_config(config))
    drafter = make_training(DrafterRecipe(method=method, **TINY), parts, COUNTS).drafter
    assert isinstance(drafter, FeatureDrafter)
    (attention,) = drafter.attention_layers
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 16)


def test_a_llamas_layers_are_described_as_its_own(model: PreTrainedModel) -> None:
    config = llama_layers(TargetParts.of(model), 2)
    assert config.to_dict() == {**model.config.to_dict(), "num_hidden_layers": 2}
    assert model.config.num_hidden_layers == 6


@pytest.mark.parametrize(
    ("architecture", "rope"),
    [
        ("gemma3", {"rope_type": "default", "rope_theta": 1_000_000.0}),  # of the layers that attend fully
        ("gpt_neox", {"rope_type": "default", "rope_theta": 10_000.0}),  # a quarter of each head
        ("gpt2", {"rope_type": "default", "rope_theta": 10_000.0}),  # none
    ],
)
def test_rotary_embeddings_are_one_for_all_layers_and_whole_heads(
    architecture: str, rope: dict[str, Any]
) -> None:
    config: Any = llama_layers(TargetParts.of(make_model(architecture)), 1)
    found = {name: value for name, value in config.rope_parameters.items() if value is not None}
    assert found == rope


def test_a_part_of_a_head_with_factors_turns_plainly() -> None:
    parts = TargetParts.of(make_model("phi3_longrope"))
    assert llama_layers(parts, 1).rope_parameters["rope_type"] == "longrope"  # type: ignore[attr-defined]
    parts.config.rope_parameters["partial_rotary_factor"] = 0.5  # type: ignore[attr-defined]
    rope = llama_layers(parts, 1).rope_parameters  # type: ignore[attr-defined]
    assert rope == {"rope_type": "default", "rope_theta": 10_000.0}


def test_a_target_of_whose_sizes_there_is_no_llama_is_named() -> None:
    parts = TargetParts.of(make_model("qwen3"))
    odd = replace(parts, hidden_size=30)
    with pytest.raises(ConfigError, match=r"target of model type 'qwen3'.*\(30\) is not a multiple"):
        llama_layers(odd, 1)


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3", "cohere2"])
@torch.no_grad()
def test_eagle3_begins_with_the_targets_norm_where_it_can(architecture: str) -> None:
    """Gemma's is stored less one; Cohere's takes the mean away, which no Llama does."""
    parts = TargetParts.of(make_model(architecture))
    weight: Any = parts.final_norm.weight
    weight.copy_(torch.linspace(0.5, 1.5, len(weight)))
    recipe = DrafterRecipe(method="eagle3", **TINY)
    drafter = make_training(recipe, parts, COUNTS).drafter
    assert isinstance(drafter, Eagle3)
    rows = torch.randn(3, parts.hidden_size, generator=torch.Generator().manual_seed(0))
    if architecture == "cohere2":
        assert bool((drafter.norm.weight == 1.0).all())
    else:
        torch.testing.assert_close(drafter.norm(rows), parts.final_norm(rows))


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_routers_and_experts_begin_as_their_family_draws_them(architecture: str) -> None:
    parts = TargetParts.of(make_model(architecture))
    drafter = make_training(DrafterRecipe(method="mtp", **TINY), parts, COUNTS).drafter
    found = {
        name.rpartition("mlp.")[2]: parameter
        for name, parameter in drafter.named_parameters()
        if ".mlp." in name
    }
    assert set(found) == {"gate.weight", "experts.gate_up_proj", "experts.down_proj"}
    for parameter in found.values():
        assert parameter.std().item() == pytest.approx(0.02, rel=0.25)
        assert abs(parameter.mean().item()) < 0.01


def test_experts_learn(texts: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_model(target, "qwen3_moe")
    recipe = DrafterRecipe(method="mtp", **(TINY | {"steps": 2, "warmup_steps": 1}))

    def experts(**changes: Any) -> dict[str, torch.Tensor]:
        chosen = options(target, texts, tmp_path, eval_texts=0, **changes)
        train_drafter(recipe, chosen)
        stored = load_file(chosen.out / "model.safetensors")
        return {name: tensor for name, tensor in stored.items() if "experts" in name}

    before, after = experts(stop_after_step=1), experts()
    assert {name.rpartition("mlp.")[2] for name in before} == {
        f"experts.{index}.{name}_proj.weight" for index in range(4) for name in ("gate", "up", "down")
    }
    for name, tensor in before.items():
        assert bool(after[name].isfinite().all())
        assert not torch.equal(after[name], tensor)


def test_nothing_of_a_plain_drafter_is_drawn_anew(model: PreTrainedModel) -> None:
    """Recipes give the weights that they have always given."""
    parts = TargetParts.of(model)
    recipe = DrafterRecipe(method="eagle", **TINY)
    torch.manual_seed(7)
    made = make_training(recipe, parts, torch.zeros(128, dtype=torch.int64)).drafter
    after = torch.rand(1)
    torch.manual_seed(7)
    linear = torch.nn.Linear(2 * parts.hidden_size, parts.hidden_size)
    layer = LlamaDecoderLayer(llama_layers(parts, 1), 0)
    assert torch.equal(after, torch.rand(1))
    assert torch.equal(made.fc.weight, linear.weight)
    assert torch.equal(made.layers[0].mlp.up_proj.weight, layer.mlp.up_proj.weight)
