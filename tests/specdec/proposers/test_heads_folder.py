"""What a folder of heads holds is compared with what the configuration says, before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.torch import save_file

from specdec.core.errors import CheckpointError, ConfigError
from specdec.drafters.checkpoints.files import open_drafter, write_tensors
from specdec.drafters.checkpoints.registry import DrafterKind, kind_of
from specdec.proposers.config import HEAD_METHODS, SpeculativeConfig
from specdec.proposers.heads_folder import open_heads
from tests.specdec.drafters import published
from tests.specdec.drafters.published import MODEL

FOLDERS: dict[str, Any] = {
    "medusa": published.medusa(),
    "hydra": published.hydra(),
    "eagle": published.eagle(),
    "eagle3": published.eagle3(),
    "eagle3 of speculators": published.speculators_eagle3(),
    "mtp": ({"architectures": ["LlamaForCausalLM"]}, published.mtp_deepseek()),
    "mtp of speculators": published.speculators_mtp(),
    "parallel_heads": published.parallel_heads(),
}


def heads(method: str, folder: Path | None, **fields: object) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate({"method": method, "model": folder and str(folder)} | fields)


def test_every_method_with_heads_has_a_kind_of_drafter() -> None:
    assert set(get_args(DrafterKind)) == HEAD_METHODS


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_of_one_method(tmp_path: Path, name: str) -> None:
    method = name.split(maxsplit=1)[0]
    published.write(tmp_path, *FOLDERS[name], MODEL)
    assert open_heads(heads(method, tmp_path), tmp_path / "target").path == tmp_path
    for other in sorted(HEAD_METHODS - {method}):
        with pytest.raises(ConfigError, match=rf"method: {other}, but .*: write method: {method}$"):
            open_heads(heads(other, tmp_path), tmp_path / "target")


def test_modules_are_looked_for_in_the_targets_folder(tmp_path: Path) -> None:
    """In its own file or in one beside it; a folder that has none is told by name."""
    one_layer = published.filled(published.layer_shapes("model.layers.0."))
    published.write(tmp_path, {}, one_layer, MODEL)
    with pytest.raises(ConfigError, match=r"mtp without `model` .* own folder, and .* holds none: give the"):
        open_heads(heads("mtp", None), tmp_path)
    save_file(published.mtp_deepseek(), tmp_path / "mtp.safetensors")
    assert "model.layers.4.eh_proj.weight" in open_heads(heads("mtp", None), tmp_path).shapes
    assert "model.layers.4.eh_proj.weight" in open_heads(heads("mtp", tmp_path), tmp_path / "other").shapes


def test_heads_beside_a_target_do_not_hide_its_modules(tmp_path: Path) -> None:
    """Nor are they taken for modules where there are none."""
    one_layer = published.filled(published.layer_shapes("model.layers.0."))
    published.write(tmp_path, {}, one_layer, MODEL)
    save_file(published.medusa()[1], tmp_path / "medusa_lm_head.safetensors")
    with pytest.raises(ConfigError, match=r"mtp without `model` .* own folder, and .* holds none: give the"):
        open_heads(heads("mtp", None), tmp_path)
    assert kind_of(open_heads(heads("medusa", tmp_path), tmp_path)) == "medusa"
    save_file(published.mtp_deepseek(), tmp_path / "mtp.safetensors")
    modules = open_heads(heads("mtp", None), tmp_path)
    assert kind_of(modules) == "mtp"
    assert modules.shapes.keys() == one_layer.keys() | published.mtp_deepseek().keys()


def a_target_with(folder: Path, *beside: str) -> dict[str, Any]:
    """Write a model, and files of heads; return the names and shapes of the model's tensors."""
    one_layer = published.filled(published.layer_shapes("model.layers.0."))
    published.write(folder, {"hydra_num_heads": 2, "hydra_head_arch": "mlp"}, one_layer, MODEL)
    for name in beside:
        write_tensors(folder / name, (published.hydra if "hydra" in name else published.medusa)()[1])
    return one_layer


@pytest.mark.parametrize("method", ["medusa", "hydra"])
def test_pickled_heads_beside_their_target_are_read_where_that_is_allowed(
    tmp_path: Path, method: str
) -> None:
    one_layer = a_target_with(tmp_path, "medusa_lm_head.pt", "hydra_lm_head.pt")
    allowed = heads(method, tmp_path, allow_pickled_weights=True)
    folder = open_heads(allowed, tmp_path)
    assert kind_of(folder) == method
    assert set(folder.files.values()) == {tmp_path / f"{method}_lm_head.pt"}
    assert not folder.shapes.keys() & one_layer.keys()
    with pytest.raises(
        CheckpointError, match=rf"{method}_lm_head.pt is pickled.*allow_pickled_weights: true"
    ):
        open_heads(heads(method, tmp_path), tmp_path)
    with pytest.raises(CheckpointError, match=r"lm_head.pt is pickled, and only safetensors are read"):
        kind_of(open_drafter(tmp_path))
    (tensors,) = (published.medusa() if method == "medusa" else published.hydra())[1:]
    save_file(tensors, tmp_path / f"{method}_lm_head.safetensors")
    for config in (allowed, heads(method, tmp_path)):
        converted = open_heads(config, tmp_path)
        assert set(converted.files.values()) == {tmp_path / f"{method}_lm_head.safetensors"}


def test_heads_of_other_kinds_beside_a_target_are_named(tmp_path: Path) -> None:
    a_target_with(tmp_path, "hydra_lm_head.pt")
    for method in ("medusa", "mtp", "eagle"):
        for allowed in (False, True):
            with pytest.raises(
                ConfigError, match=rf"method: {method}, but .* holds Hydra: write method: hydra$"
            ):
                open_heads(heads(method, tmp_path, allow_pickled_weights=allowed), tmp_path)


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_modules_of_a_target_that_is_named_are_found_beside_heads(tmp_path: Path, ending: str) -> None:
    one_layer = a_target_with(tmp_path, f"medusa_lm_head.{ending}")
    save_file(published.mtp_deepseek(), tmp_path / "mtp.safetensors")
    for named in (None, tmp_path):
        for allowed in (False, True):
            modules = open_heads(heads("mtp", named, allow_pickled_weights=allowed), tmp_path)
            assert kind_of(modules) == "mtp"
            assert modules.shapes.keys() == one_layer.keys() | published.mtp_deepseek().keys()


def test_heads_inside_a_whole_model_need_no_pickled_ones_beside_it(tmp_path: Path) -> None:
    one_layer = a_target_with(tmp_path, "medusa_lm_head.pt")
    inside = {f"medusa_head.{name}": tensor for name, tensor in published.medusa()[1].items()}
    published.write(tmp_path, {}, one_layer | inside, MODEL)
    found = open_heads(heads("medusa", tmp_path), tmp_path)
    assert kind_of(found) == "medusa"
    assert inside.keys() <= found.shapes.keys()


def test_kinds_that_are_not_supported_are_told(tmp_path: Path) -> None:
    config, tensors = published.speculators_eagle3()
    published.write(tmp_path, config | {"speculators_model_type": "peagle"}, tensors, MODEL)
    with pytest.raises(CheckpointError, match="speculators_model_type is 'peagle'; one of eagle3, mtp is"):
        open_heads(heads("eagle3", tmp_path), tmp_path / "target")
    published.write(tmp_path, {}, published.filled({"some.weight": (2,)}), MODEL)
    with pytest.raises(CheckpointError, match="holds no drafter of a known format"):
        open_heads(heads("eagle3", tmp_path), tmp_path / "target")
