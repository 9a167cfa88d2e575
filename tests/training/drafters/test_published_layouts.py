"""What is trained is written as others publish it, tensor by tensor, for a target that shares its ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.borrowed import embedding_rows
from specdec.drafters.checkpoints.fit import is_rotary_buffer
from specdec.drafters.checkpoints.registry import load_drafter
from tests.architectures import make_model
from tests.specdec.drafters import published
from tests.specdec.drafters.conftest import randomize, tiny_config
from tests.specdec.drafters.published import HIDDEN, KNOWN_IDS, LAYER_CONFIG, LAYERS, VOCAB, Tensors
from tests.training.drafters.tiny_runs import TINY
from training.drafters.methods import Training, make_training
from training.drafters.recipe import CheckpointLayout, DrafterRecipe, Method

TARGET_NAME = "somebody/some-model"
Written = tuple[dict[str, Any], Tensors]


def target_of(config: PretrainedConfig) -> TargetParts:
    model = AutoModelForCausalLM.from_config(config)
    randomize(model, seed=1)
    return TargetParts.of(model.eval())


def trained(target: TargetParts, method: Method, **changes: Any) -> Training:
    """A drafter at its beginning: layouts do not depend on what is learnt."""
    torch.manual_seed(0)
    counts = torch.zeros(target.vocab_size, dtype=torch.int64).index_fill(0, torch.tensor(KNOWN_IDS), 1)
    return make_training(DrafterRecipe(method=method, **(TINY | changes)), target, counts)


def with_ends(tensors: Tensors, num_modules: int) -> Tensors:
    """Modules with what DeepSeek publishes in each of them."""
    ends = ("embed_tokens", "shared_head.head")
    names = [f"model.layers.{LAYERS + index}.{end}.weight" for index in range(num_modules) for end in ends]
    return tensors | {name: torch.zeros(VOCAB, HIDDEN) for name in names}


def layout_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, bool]]:
    """Shapes, and whether tensors are weights; tables that once were stored are computed now."""
    return {
        name: (tensor.shape, tensor.is_floating_point())
        for name, tensor in tensors.items()
        if not is_rotary_buffer(name)
    }


EAGLE3: dict[str, Any] = {"draft_vocab_size": len(KNOWN_IDS), "fused_layers": (2, 1, 3)}


@pytest.mark.parametrize(
    ("method", "changes", "layout", "file", "wanted", "differs"),
    [
        ("medusa", {}, "published", "medusa_lm_head", published.medusa(), {"transformers_version"}),
        ("hydra", {"num_layers": 2}, "published", "hydra_lm_head", published.hydra(), set()),
        (
            "hydra",
            {"num_layers": 2, "has_prefix_layer": True},
            "published",
            "hydra_lm_head",
            published.hydra(has_prefix_layer=True),
            set(),
        ),
        ("eagle", {}, "published", "model", published.eagle(), set()),
        ("eagle3", EAGLE3, "published", "model", published.eagle3(), set()),
        ("eagle3", {**EAGLE3, "is_v31": True}, "published", "model", published.eagle3(fc_norm=True), set()),
        (
            "eagle3",
            EAGLE3,
            "speculators",
            "model",
            published.speculators_eagle3(),
            {"target_hidden_size", "norm_before_residual", "speculators_config", "transformer_layer_config"},
        ),
        ("mtp", {}, "published", "model", ({}, with_ends(published.mtp_deepseek(), 1)), set()),
        (
            "mtp",
            {"num_modules": 2},
            "published",
            "model",
            ({"num_nextn_predict_layers": 2}, with_ends(published.mtp_deepseek(2), 2)),
            set(),
        ),
        ("parallel_heads", {"depth": 2}, "published", "model", published.parallel_heads(), set()),
    ],
    ids=[
        *("medusa", "hydra", "hydra++", "eagle", "eagle3", "eagle3.1", "eagle3 of speculators", "mtp"),
        *("two mtp", "parallel_heads"),
    ],
)
def test_what_is_written_is_laid_out_as_published(
    tmp_path: Path,
    method: Method,
    changes: dict[str, Any],
    layout: CheckpointLayout,
    file: str,
    wanted: Written,
    differs: set[str],
) -> None:
    target = target_of(tiny_config(tie_word_embeddings=True))
    training = trained(target, method, **changes)
    training.save(tmp_path, TARGET_NAME, layout)
    config, tensors = wanted
    assert layout_of(load_file(tmp_path / f"{file}.safetensors")) == layout_of(tensors)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {name: written.get(name) for name in config.keys() - differs} == {
        name: value for name, value in config.items() if name not in differs
    }
    if layout == "speculators":
        assert written["transformer_layer_config"].items() >= LAYER_CONFIG.items()
        assert written["transformer_layer_config"]["tie_word_embeddings"] is False
    if method in ("eagle", "eagle3", "mtp"):
        assert written["tie_word_embeddings"] is False, "its LM head is its own, or the target's"
    again = load_drafter(tmp_path, target)
    assert again.borrowed == training.drafter.borrowed, "nothing of the target is kept twice"
    mine, theirs = training.drafter.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in mine.items())


def test_a_module_is_laid_out_as_speculators_publishes_it(tmp_path: Path) -> None:
    """Without embeddings and head, which are the target's: as this is tied, so is what is said of it."""
    layers = {**LAYER_CONFIG, "model_type": "qwen3", "num_hidden_layers": LAYERS}
    target = target_of(AutoConfig.for_model(**layers, tie_word_embeddings=True))
    training = trained(target, "mtp")
    training.save(tmp_path, TARGET_NAME, "speculators")
    config, tensors = published.speculators_mtp()
    assert layout_of(load_file(tmp_path / "model.safetensors")) == layout_of(tensors)
    written = json.loads((tmp_path / "config.json").read_text())
    same = config.keys() - {"speculators_config", "transformer_layer_config"}
    assert {name: written[name] for name in same} == {name: config[name] for name in same}
    layer = written["transformer_layer_config"]
    assert layer.items() >= config["transformer_layer_config"].items()
    assert layer["tie_word_embeddings"] is True
    assert load_drafter(tmp_path, target).borrowed == {"embeddings", "head"}


def test_eagle_is_written_with_the_targets_embeddings(tmp_path: Path) -> None:
    target = target_of(tiny_config())
    trained(target, "eagle").save(tmp_path, TARGET_NAME, "published")
    stored = load_file(tmp_path / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(stored, target.embeddings.weight)  # type: ignore[arg-type]


def test_embeddings_that_the_target_scales_are_written_scaled(tmp_path: Path) -> None:
    """Engines of EAGLE look them up and do nothing else."""
    target = TargetParts.of(make_model("gemma3"))
    training = trained(target, "eagle")
    training.save(tmp_path, TARGET_NAME, "published")
    stored = load_file(tmp_path / "model.safetensors")["embed_tokens.weight"]
    tokens = torch.tensor([[5, 3, 7]])
    assert torch.equal(stored[tokens], target.embeddings(tokens))
    assert not torch.equal(stored, target.embeddings.weight)  # type: ignore[arg-type]
    assert torch.equal(stored, embedding_rows(target))
    assert load_drafter(tmp_path, target).borrowed == {"embeddings", "head"}
