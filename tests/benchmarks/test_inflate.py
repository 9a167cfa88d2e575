import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.inflate import evenly_between, inflate, layers_for_parameters
from specdec.core.errors import CheckpointError, ConfigError


def logits(folder: Path, token_ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        return model(token_ids).logits


@pytest.mark.parametrize("num_layers", [3, 4, 11])
def test_logits_are_equal_bit_for_bit(small: Path, tmp_path: Path, num_layers: int) -> None:
    token_ids = torch.randint(0, 64, (2, 17))
    inflate(small, tmp_path / "big", num_layers)
    assert torch.equal(logits(small, token_ids), logits(tmp_path / "big", token_ids))


def test_inserted_layers_cost_but_do_nothing(small: Path, tmp_path: Path) -> None:
    inflate(small, tmp_path / "big", 9)
    tensors = load_file(tmp_path / "big" / "model.safetensors")
    config = json.loads((tmp_path / "big" / "config.json").read_text())
    assert config["drafthouse_layer_positions"] == [0, 4, 8]
    for index in range(9):
        original = index in (0, 4, 8)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            assert bool(tensors[f"model.layers.{index}.{name}.weight"].any()) is original
        assert bool(tensors[f"model.layers.{index}.self_attn.q_proj.weight"].any())


def test_a_changed_layer_would_be_seen(small: Path, tmp_path: Path) -> None:
    inflate(small, tmp_path / "big", 6)
    file = tmp_path / "big" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.o_proj.weight"] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    token_ids = torch.randint(0, 64, (1, 9))
    assert not torch.equal(logits(small, token_ids), logits(tmp_path / "big", token_ids))


def test_the_mtp_module_follows_the_last_layer(small: Path, tmp_path: Path) -> None:
    inflate(small, tmp_path / "big", 7)
    assert list(load_file(tmp_path / "big" / "mtp.safetensors")) == ["model.layers.7.eh_proj.weight"]


def test_layers_follow_from_parameters(small: Path, tmp_path: Path) -> None:
    count = layers_for_parameters(small, 200_000)
    inflate(small, tmp_path / "big", count)
    parameters = sum(t.numel() for t in load_file(tmp_path / "big" / "model.safetensors").values())
    assert parameters == pytest.approx(200_000, rel=0.05)


def test_what_cannot_be_inflated_is_refused(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fewer"):
        inflate(small, tmp_path / "big", 2)
    with pytest.raises(ConfigError, match="not empty"):
        inflate(small, small, 5)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        inflate(tmp_path / "nowhere", tmp_path / "big", 5)
    assert evenly_between(3, 9) == [0, 4, 8]
