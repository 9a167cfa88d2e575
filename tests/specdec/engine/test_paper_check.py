"""What is told of an engine's models without their weights is what loading them would tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file

from specdec.core.errors import UserError
from specdec.engine.build import build_parts
from specdec.engine.config import EngineConfig
from specdec.engine.paper_check import check_on_paper
from tests.architectures import make_tokenizer, save_model

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, architecture in (("target", "llama"), ("draft", "llama"), ("experts", "mixtral")):
        save_model(folder / name, architecture)
    lacking = folder / "lacking"
    save_model(lacking)
    tensors = load_file(lacking / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, lacking / WEIGHTS, metadata={"format": "pt"})
    bloom = transformers.BloomConfig(vocab_size=128, hidden_size=32, n_layer=2, n_head=2)
    transformers.AutoModelForCausalLM.from_config(bloom).save_pretrained(folder / "bloom")
    make_tokenizer().save_pretrained(folder / "bloom")
    for name in ("mute", "unending", "windowed"):
        save_model(folder / name)
    windowed = folder / "windowed" / "config.json"
    windowed.write_text(json.dumps(json.loads(windowed.read_text()) | {"sliding_window": 64}))
    (folder / "mute" / "tokenizer_config.json").write_text("[")
    (folder / "unending" / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    return folder


def config_of(folders: Path, target: dict[str, Any], speculative: dict[str, Any]) -> EngineConfig:
    def placed(block: dict[str, Any]) -> dict[str, Any]:
        return {**block, **({"model": str(folders / block["model"])} if "model" in block else {})}

    return EngineConfig.model_validate(
        {
            "target": {"compile": {"mode": "off"}, **placed({"model": "target", **target})},
            "speculative_config": {"controller": "fixed", **placed(speculative)},
            "cache": {"num_blocks": 16},
        }
    )


NONE: dict[str, Any] = {"method": "none"}


@pytest.mark.parametrize(
    ("target", "speculative"),
    [
        ({}, NONE),
        ({"max_model_len": 256, "quantization": "int4"}, {"method": "ngram"}),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, NONE),
        ({"model": "experts"}, {"method": "draft_model", "model": "draft", "quantization": "int8"}),
        ({}, {"method": "draft_model", "model": "windowed"}),
        ({"model": "windowed", "max_model_len": 64}, NONE),
        ({}, {"method": "layerskip", "exit_layer": 2}),
        ({}, {"method": "quantized", "quantization": "int4"}),
    ],
)
def test_what_can_be_run_passes(folders: Path, target: dict[str, Any], speculative: dict[str, Any]) -> None:
    check_on_paper(config_of(folders, target, speculative))


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.parametrize(
    ("target", "speculative", "message"),
    [
        ({"model": "bloom"}, NONE, "bloom cannot be served: .*; docs/models.md says what can be served"),
        ({"model": "lacking"}, NONE, "lack 1 tensors of the model, first model.layers.1.mlp.up_proj"),
        ({"model": "mute"}, NONE, "mute has no tokenizer that can be loaded"),
        ({"model": "unending"}, NONE, "generation_config.json: eos_token_id must be a token id"),
        ({"quantization": "int4-64"}, NONE, "q_proj has 32 inputs, which groups of 64 do not divide"),
        ({"max_model_len": 257}, NONE, "max_model_len = 257 exceeds the 256 positions"),
        ({}, {"method": "draft_model", "model": "bloom"}, "bloom cannot be served"),
        ({}, {"method": "draft_model", "model": "lacking"}, "lacking: the weights lack 1 tensors"),
        ({}, {"method": "draft_model", "model": "mute"}, "mute has no tokenizer that can be loaded"),
        ({"model": "windowed"}, NONE, "transformers keeps the last 64 of them .*: set max_model_len to 64"),
        (
            {},
            {"method": "layerskip", "exit_layer": 3},
            "exit_layer: 3 does not leave out any of the 3 layers",
        ),
        (
            {"model": "experts"},
            {"method": "quantized", "quantization": "int8"},
            "int8 does not go with experts: .* belongs to a Mixtral",
        ),
        (
            {},
            {"method": "retrieval", "retrieval": {"path": "/nowhere/to/be/found"}},
            "there is no file or folder /nowhere/to/be/found",
        ),
    ],
)
def test_what_cannot_is_refused_as_by_who_loads_it(
    folders: Path,
    target: dict[str, Any],
    speculative: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(folders, target, speculative)
    with pytest.raises(UserError, match=f"(?s){message}") as loading:
        build_parts(config)
    monkeypatch.setattr("specdec.model.loader._read_weights", None)
    with pytest.raises(UserError, match=f"(?s){message}") as checking:
        check_on_paper(config)
    assert type(checking.value) is type(loading.value)


@pytest.mark.usefixtures("threads_as_before")
def test_a_draft_model_may_look_further_than_its_own_generate(folders: Path) -> None:
    config = config_of(folders, {}, {"method": "draft_model", "model": "windowed"})
    build_parts(config)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3: its 4 attention heads cannot be divided"),
        ({"pipeline_parallel_size": 4}, "pipeline_parallel_size 4: its 3 layers cannot be divided"),
    ],
)
def test_what_cannot_be_divided_is_refused(folders: Path, target: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_on_paper(config_of(folders, target, NONE))
