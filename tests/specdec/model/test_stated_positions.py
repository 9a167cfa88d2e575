"""What config.json says of a model's positions is what the loader makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from specdec.core.errors import ConfigError
from specdec.model.config import ModelConfig
from specdec.model.facts import resolve_max_model_len
from specdec.model.rotary import longest_sequence, rule_of
from specdec.model.stated_positions import StatedPositions, positions_of, stated_positions
from tests.architectures import ARCHITECTURES, MAX_POSITIONS, ORIGINAL_POSITIONS

KINDS = {
    "llama": StatedPositions(MAX_POSITIONS),
    "llama3_rope": StatedPositions(MAX_POSITIONS),
    "llama_linear_rope": StatedPositions(MAX_POSITIONS),
    "llama_yarn": StatedPositions(MAX_POSITIONS),
    "gemma3": StatedPositions(MAX_POSITIONS),
    "phi3_longrope": StatedPositions(MAX_POSITIONS, "longrope", ORIGINAL_POSITIONS),
    "llama_dynamic_ntk": StatedPositions(4 * ORIGINAL_POSITIONS, "dynamic", ORIGINAL_POSITIONS),
}


def written(folder: Path, architecture: str, **changes: Any) -> dict[str, Any]:
    """Return config.json as transformers writes it, changed."""
    ARCHITECTURES[architecture]().save_pretrained(folder)
    file = folder / "config.json"
    settings: dict[str, Any] = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(settings))
    return settings


def in_old_words(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the same model as older folders describe it."""
    rope = dict(settings["rope_parameters"])
    rope["type"] = rope.pop("rope_type")
    others = {name: value for name, value in settings.items() if name != "rope_parameters"}
    return {**others, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("architecture", KINDS)
def test_the_file_and_what_is_loaded_say_the_same(tmp_path: Path, architecture: str, is_old: bool) -> None:
    settings = written(tmp_path, architecture)
    if is_old and "rope_type" in settings["rope_parameters"]:
        settings = in_old_words(settings)
        (tmp_path / "config.json").write_text(json.dumps(settings))
    stated = stated_positions(settings)
    assert stated[:3] == KINDS[architecture][:3]
    loaded = transformers.AutoConfig.from_pretrained(tmp_path)
    assert longest_sequence(loaded) == stated.num_positions
    rule = rule_of(loaded, MAX_POSITIONS)
    assert (rule and rule.kind) == stated.kind
    assert (rule and rule.variants.original_len) == stated.original_len


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(("architecture", "number"), [("llama_yarn", 256), ("llama_linear_rope", 64)])
def test_yarn_alone_lengthens_what_is_stated(
    tmp_path: Path, architecture: str, number: int, is_old: bool
) -> None:
    """A recipe that leaves `max_position_embeddings` as it was; of a linear factor nobody knows of what."""
    settings = written(tmp_path, architecture, max_position_embeddings=64)
    assert settings["rope_parameters"]["factor"] == 4
    if is_old:
        settings = in_old_words(settings)
        (tmp_path / "config.json").write_text(json.dumps(settings))
    stated = stated_positions(settings)
    assert stated.num_positions == number
    assert ("linear, factor 4" in stated.advice) == (number == 64)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert longest_sequence(config) == number
    folder = ModelConfig(model=str(tmp_path), max_model_len=number + 1)
    with pytest.raises(ConfigError, match=f"exceeds the {number} positions") as caught:
        resolve_max_model_len(folder, config)
    assert ("write the new length to max_position_embeddings" in str(caught.value)) == (number == 64)


def test_yarn_beyond_what_it_stretches_is_not_shortened() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert stated_positions({"max_position_embeddings": 300, "rope_parameters": rope}).num_positions == 300
    del rope["original_max_position_embeddings"]
    assert stated_positions({"max_position_embeddings": 64, "rope_parameters": rope}).num_positions == 64


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_a_dynamic_embedding_with_alpha_is_fixed_where_alpha_is_heeded(name: str) -> None:
    rope = {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}
    settings = {"model_type": "hunyuan_v1_dense", "max_position_embeddings": 64, name: rope}
    assert stated_positions(settings) == StatedPositions(64)
    without = {**settings, name: {**rope, "alpha": None}}
    for others in (without, {**settings, "model_type": "llama"}):
        assert stated_positions(others) == StatedPositions(128, "dynamic", 64)


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_position_embeddings": "many"}, {"n_positions": 8}, {"rope_parameters": {"type": "dynamic"}}],
)
def test_what_is_not_said_in_plain_words_is_not_known(settings: dict[str, Any]) -> None:
    assert stated_positions(settings) == StatedPositions(None)


@pytest.mark.parametrize("part", ["text_config", "transformer_layer_config"])
def test_the_part_that_is_about_text_counts(part: str) -> None:
    outer = {"max_position_embeddings": 8}
    assert positions_of(outer).num_positions == 8
    assert positions_of({**outer, part: {"max_position_embeddings": 64}}).num_positions == 64
    assert positions_of({**outer, part: {}}).num_positions is None
    assert positions_of({**outer, part: "none"}).num_positions == 8
