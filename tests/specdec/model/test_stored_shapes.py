"""Checkpoints that do not fit their config.json, found without reading weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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


# ---------------------------------------------------------------------------- what tensors are stored as

CODES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8, "U8": torch.uint8}


def store_codes(folder: Path, name_part: str, dtype: torch.dtype) -> str:
    """Store tensors as codes, with scales beside them and nothing in config.json; return the first's name."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    names = [name for name in sorted(weights) if name_part in name]
    for name in names:
        weights[name] = weights[name].to(dtype)
        weights[f"{name}_scale"] = torch.ones(1)
    save_file(weights, file, metadata={"format": "pt"})
    return names[0]


@pytest.mark.parametrize("stored", CODES)
@pytest.mark.parametrize(
    ("architecture", "part"),
    [
        ("llama", "up_proj"),
        ("llama_tied", "embed_tokens"),
        ("gpt2", "mlp.c_proj.weight"),
        ("mixtral", "experts.1"),
    ],
)
def test_codes_are_not_taken_for_weights(
    architecture: str, part: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, architecture)
    name = store_codes(tmp_path, part, CODES[stored])
    monkeypatch.setattr("specdec.model.loader.revision_of", None)  # before weights are read
    config = ModelConfig(model=str(tmp_path), device="cpu")
    for refuses in (load_model, check_stored_shapes):
        with pytest.raises(
            CheckpointError, match=f"tensor {name} is stored as {stored}: .*quantised"
        ) as caught:
            refuses(config)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_codes_are_not_quantized_again(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path)
    store_codes(tmp_path, "up_proj", torch.float8_e4m3fn)
    monkeypatch.setattr("specdec.model.loader.require_torchao", lambda name: None)
    monkeypatch.setattr("specdec.model.loader.read_quantized", None)
    config = ModelConfig.model_validate({"model": str(tmp_path), "dtype": dtype, "quantization": "int8"})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is stored as F8_E4M3"):
        load_model(config)


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
def test_numbers_of_any_width_are_weights(tmp_path: Path, stored: torch.dtype) -> None:
    save_model(tmp_path)
    store_codes(tmp_path, "proj", stored)
    check_stored_shapes(ModelConfig(model=str(tmp_path)))
    assert load_model(ModelConfig(model=str(tmp_path), device="cpu")).dtype == torch.float32


@pytest.mark.parametrize(
    ("architecture", "name", "tensor"),
    [
        ("gpt2", "transformer.h.0.attn.bias", torch.ones(1, 1, 8, 8, dtype=torch.bool)),
        ("gpt2", "h.0.attn.bias", torch.ones(1, 1, 8, 8, dtype=torch.uint8)),
        ("gpt_neox", "gpt_neox.layers.0.attention.bias", torch.ones(1, 1, 8, 8, dtype=torch.bool)),
        ("llama", "model.layers.3.mtp.weight", torch.ones(4, 4).to(torch.float8_e4m3fn)),
    ],
)
def test_masks_and_what_the_model_does_not_use_are_stored_as_anything(
    architecture: str, name: str, tensor: torch.Tensor, tmp_path: Path
) -> None:
    save_model(tmp_path, architecture)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: tensor}, file, metadata={"format": "pt"})
    check_stored_shapes(ModelConfig(model=str(tmp_path)))
    load_model(ModelConfig(model=str(tmp_path), device="cpu"))


def test_a_dtype_that_nobody_knows_is_a_fault_of_the_folder(tmp_path: Path) -> None:
    save_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F99"', 1))
    with pytest.raises(CheckpointError, match=r"the weights cannot be loaded: .*F99"):
        load_model(ModelConfig(model=str(tmp_path), dtype="float32"))
