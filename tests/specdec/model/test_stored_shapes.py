"""Checkpoints that do not fit their config.json, found without reading weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specdec.core.errors import CheckpointError
from specdec.model.config import ModelConfig
from specdec.model.loader import load_model
from specdec.model.stored_shapes import check_stored_shapes
from tests.architectures import ARCHITECTURES, save_model


def change(folder: Path, name_part: str, *, drop: bool = False) -> str:
    """Cut a tensor, or leave it out; return its name."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in sorted(weights) if name_part in name)
    if drop:
        del weights[name]
    else:
        weights[name] = weights[name][..., :-4].clone()
    save_file(weights, file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_fits_passes(architecture: str, tmp_path: Path) -> None:
    save_model(tmp_path, architecture)
    check_stored_shapes(ModelConfig(model=str(tmp_path), quantization="int8", device="cuda:7"))


@pytest.mark.parametrize("architecture", ["llama", "gpt_neox", "gpt2", "gemma3"])
@pytest.mark.parametrize("drop", [False, True])
def test_what_does_not_fit_is_named_as_its_worker_would(
    architecture: str, drop: bool, tmp_path: Path
) -> None:
    save_model(tmp_path, architecture)
    part = {"gpt_neox": "dense_4h_to_h.weight", "gpt2": "mlp.c_proj.weight"}.get(architecture, "down_proj")
    name = change(tmp_path, part, drop=drop)
    config = ModelConfig(model=str(tmp_path), device="cpu")
    with pytest.raises(CheckpointError, match="lack 1 tensors" if drop else "has shape") as early:
        check_stored_shapes(config)
    assert name.rpartition("layers.")[2] in str(early.value)
    with pytest.raises(CheckpointError, match="lack 1 tensors" if drop else "has shape"):
        load_model(config)


def test_tied_weights_may_be_stored_once(tmp_path: Path) -> None:
    save_model(tmp_path, "gemma3")
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "lm_head" in name]
    check_stored_shapes(ModelConfig(model=str(tmp_path)))
    change(tmp_path, "embed_tokens", drop=True)
    with pytest.raises(CheckpointError, match="lack 2 tensors of the model, first lm_head"):
        check_stored_shapes(ModelConfig(model=str(tmp_path)))
