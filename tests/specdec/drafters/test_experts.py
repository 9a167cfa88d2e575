"""Modules of mixtures: experts are published one by one, and transformers stacks them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from specdec.core.errors import CheckpointError
from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.experts import one_by_one, stacked_experts
from specdec.drafters.checkpoints.mtp import save_mtp
from specdec.drafters.checkpoints.registry import load_drafter
from specdec.drafters.checkpoints.speculators import save_speculator
from specdec.drafters.mtp import Mtp
from tests.specdec.drafters import published
from tests.specdec.drafters.conftest import HIDDEN, LAYERS, Target, randomize, tiny_config
from tests.specdec.drafters.published import MODEL, Tensors

NUM_EXPERTS, EXPERT = 3, 12
COUNTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": EXPERT}
MIXTURES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "glm4_moe": (transformers.Glm4MoeConfig, {"n_routed_experts": NUM_EXPERTS, "first_k_dense_replace": 1}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {"num_experts": NUM_EXPERTS}),
}


def mixture(kind: str, num_layers: int = LAYERS) -> Target:
    described = {name: value for name, value in tiny_config().to_dict().items() if name != "model_type"}
    make, of_kind = MIXTURES[kind]
    config = make(**(described | COUNTS | of_kind | {"num_hidden_layers": num_layers}))
    model: Any = AutoModelForCausalLM.from_config(config)
    randomize(model, seed=1)
    return Target(model.eval(), TargetParts.of(model))


def decoder_layer(kind: str, folder: Path) -> tuple[Tensors, Tensors]:
    """A layer as transformers writes it (by names inside of the layer), and as it is in the model."""
    model = mixture(kind, LAYERS + 1).model
    model.save_pretrained(folder)  # type: ignore[no-untyped-call]
    prefix = f"model.layers.{LAYERS}."
    stored, state = load_file(folder / MODEL), model.state_dict()
    as_published, as_used = (
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        for tensors in (stored, state)
    )
    return as_published, as_used


def outside_of_the_layer(names: dict[str, str]) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {name: (HIDDEN,) for part, name in names.items() if part != "fc"}
    return published.filled(shapes | {names["fc"]: (HIDDEN, 2 * HIDDEN)}, seed=2)


DEEPSEEK = {
    "enorm": f"model.layers.{LAYERS}.enorm.weight",
    "hnorm": f"model.layers.{LAYERS}.hnorm.weight",
    "norm": f"model.layers.{LAYERS}.shared_head.norm.weight",
    "fc": f"model.layers.{LAYERS}.eh_proj.weight",
}
QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "norm": "mtp.norm.weight",
    "fc": "mtp.fc.weight",
}
SPECULATORS = {
    "enorm": "mtp_layers.0.token_layernorm.weight",
    "hnorm": "mtp_layers.0.hidden_layernorm.weight",
    "norm": "mtp_layers.0.final_layernorm.weight",
    "fc": "mtp_layers.0.input_proj.weight",
}


def check_block(modules: object, layer: Tensors) -> None:
    assert isinstance(modules, Mtp)
    state = modules.mtp_modules[0].block.state_dict()  # type: ignore[union-attr]
    assert state.keys() == layer.keys()
    for name, tensor in layer.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("layout", ["deepseek", "qwen"])
def test_modules_in_a_targets_folder(kind: str, layout: str, folder: Path) -> None:
    """As transformers itself stores a layer of that kind; what is written has these names again."""
    stored, layer = decoder_layer(kind, folder / "with one layer more")
    target = mixture(kind)
    prefix = f"model.layers.{LAYERS}." if layout == "deepseek" else "mtp.layers.0."
    tensors = {f"{prefix}{name}": tensor for name, tensor in stored.items()}
    tensors |= outside_of_the_layer(DEEPSEEK if layout == "deepseek" else QWEN)
    assert f"{prefix}mlp.experts.{NUM_EXPERTS - 1}.gate_proj.weight" in tensors
    published.whole_target(folder, target.model, tensors)
    modules = load_drafter(folder, target.parts)
    check_block(modules, layer)
    assert isinstance(modules, Mtp)
    save_mtp(modules, folder)
    again = load_file(folder / "mtp.safetensors")
    assert {name for name in again if "mlp." in name} == {
        f"model.layers.{LAYERS}.{name}" for name in stored if name.startswith("mlp.")
    }
    for name, tensor in stored.items():
        assert torch.equal(again[f"model.layers.{LAYERS}.{name}"], tensor), name


def test_a_module_of_speculators(folder: Path) -> None:
    stored, layer = decoder_layer("qwen3_moe", folder / "with one layer more")
    target = mixture("qwen3_moe")
    config, _ = published.speculators_mtp()
    config["transformer_layer_config"] = target.parts.config.to_dict()
    tensors = {f"mtp_layers.0.{name}": tensor for name, tensor in stored.items()}
    tensors |= outside_of_the_layer(SPECULATORS)
    published.write(folder / "head", config, tensors, MODEL)
    modules = load_drafter(folder / "head", target.parts)
    check_block(modules, layer)
    assert isinstance(modules, Mtp)
    save_speculator(modules, folder / "again", base_model="m", num_speculative_tokens=3)
    again = load_file(folder / "again" / MODEL)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items())
    assert json.loads((folder / "again" / "config.json").read_text())["speculators_model_type"] == "mtp"


def test_experts_that_are_stored_stacked(folder: Path) -> None:
    """Heads that were trained here before, and what transformers' own names are, load as they are."""
    _, layer = decoder_layer("qwen3_moe", folder / "with one layer more")
    target = mixture("qwen3_moe")
    tensors = {f"model.layers.{LAYERS}.{name}": tensor for name, tensor in layer.items()}
    published.whole_target(folder, target.model, tensors | outside_of_the_layer(DEEPSEEK))
    check_block(load_drafter(folder, target.parts), layer)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (None, f"lack 1 tensors, first {{}} of shape ({EXPERT}, {HIDDEN})"),
        (torch.zeros(EXPERT, HIDDEN + 1), f"tensor {{}} has shape ({EXPERT}, {HIDDEN + 1})"),
        (torch.zeros(EXPERT, HIDDEN, dtype=torch.int8), "tensor {} holds torch.int8"),
    ],
)
def test_an_expert_that_is_not_what_it_should_be_is_named(
    change: torch.Tensor | None, text: str, folder: Path
) -> None:
    stored, _ = decoder_layer("qwen3_moe", folder / "with one layer more")
    target = mixture("qwen3_moe")
    tensors = {f"model.layers.{LAYERS}.{name}": tensor for name, tensor in stored.items()}
    name = f"model.layers.{LAYERS}.mlp.experts.1.up_proj.weight"
    del tensors[name]
    if change is not None:
        tensors[name] = change
    published.whole_target(folder, target.model, tensors | outside_of_the_layer(DEEPSEEK))
    with pytest.raises(CheckpointError, match=re.escape(text.format(name))):
        load_drafter(folder, target.parts)


def test_experts_whose_matrices_are_transposed_stay_stacked() -> None:
    config = transformers.GptOssConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model = AutoModelForCausalLM.from_config(config)
    assert stacked_experts(model) == {}
    assert one_by_one(model).keys() == model.state_dict().keys()


def test_files_of_plain_drafters_hold_what_they_held(folder: Path, target: Target) -> None:
    modules = Mtp(target.parts)
    assert stacked_experts(modules) == {}
    save_file(one_by_one(modules), folder / MODEL)
    assert load_file(folder / MODEL).keys() == modules.state_dict().keys()
