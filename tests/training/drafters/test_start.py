"""Drafters that begin with the weights of another: what comes with these, and what is said of other ones."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from specdec.core.errors import CheckpointError, ConfigError
from specdec.drafters.base import Drafter, TargetParts
from specdec.drafters.checkpoints.eagle import save_eagle
from specdec.drafters.checkpoints.registry import load_drafter
from specdec.drafters.eagle import Eagle
from tests.training.drafters.tiny_runs import TINY, options
from training.drafters.capture import Capture
from training.drafters.drafting import draft_everywhere
from training.drafters.layers import llama_layers
from training.drafters.methods import Training, make_training
from training.drafters.recipe import METHODS, CheckpointLayout, DrafterRecipe, Method, flag_of
from training.drafters.start import options_of, start_from
from training.drafters.train import train_drafter

BESIDE_TARGET = sorted({*METHODS} - {"medusa2", "layerskip", "draft_model"})


def training_of(model: PreTrainedModel, method: Method, *, seed: int = 0, **changes: Any) -> Training:
    torch.manual_seed(seed)
    recipe = DrafterRecipe(method=method, **(TINY | changes))
    return make_training(recipe, TargetParts.of(model), torch.arange(128))


def made(
    model: PreTrainedModel,
    folder: Path,
    method: Method,
    *,
    layout: CheckpointLayout = "published",
    **changes: Any,
) -> Path:
    """The folder of a drafter with random weights."""
    training_of(model, method, seed=1, **changes).save(folder, "target", layout)
    return folder


def edit(folder: Path, part: str | None = None, **keys: Any) -> None:
    file = folder / "config.json"
    content = json.loads(file.read_text())
    (content if part is None else content[part]).update(keys)
    file.write_text(json.dumps(content))


def logits(model: PreTrainedModel, drafter: Drafter) -> torch.Tensor:
    """What a drafter says behind every place of a text, at all depths."""
    capture = Capture(model, drafter.hidden_layers)
    tokens = torch.randint(5, 100, (1, 12), generator=torch.Generator().manual_seed(4))
    said: list[torch.Tensor] = []

    def choose(depth: int, of_depth: torch.Tensor) -> torch.Tensor:
        said.append(of_depth)
        return tokens[:, 1:]

    hidden = capture.hidden(capture.states(tokens))[:, :-1]
    draft_everywhere(drafter.eval(), hidden, tokens, 3, choose)
    return torch.stack(said)


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        ("eagle3", {"norm_before_residual": True}),
        ("eagle3", {"norm_output": True}),
        ("eagle3", {"rms_norm_eps": 0.5}),
        ("eagle", {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}),
        ("hydra", {"hidden_state_offset": 2}),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else one,
)
def test_settings_that_no_option_says_come_with_the_weights(
    model: PreTrainedModel, tmp_path: Path, method: Method, keys: dict[str, Any]
) -> None:
    first = made(model, tmp_path / "first", method)
    edit(first, **keys)
    training = training_of(model, method)
    start_from(training, first, allow_pickled=False)
    wanted = load_drafter(first, TargetParts.of(model))
    assert torch.equal(logits(model, training.drafter), logits(model, wanted))
    training.save(tmp_path / "second", "target", "published")
    again = load_drafter(tmp_path / "second", TargetParts.of(model))
    assert torch.equal(logits(model, again), logits(model, wanted))
    content = json.loads((tmp_path / "second" / "config.json").read_text())
    assert {name: content[name] for name in keys} == keys
    weights_alone = training_of(model, method).drafter
    weights_alone.load_state_dict(wanted.state_dict())
    assert not torch.equal(logits(model, weights_alone), logits(model, wanted)), "negative control"


@pytest.mark.parametrize(
    ("method", "there", "here", "text"),
    [
        ("eagle3", {"fused_layers": (0, 2, 4)}, {}, "with --fused-layers 0,2,4, not 2,3,3: give that"),
        ("eagle3", {"is_v31": True}, {}, "was made with --v31: give it"),
        ("eagle3", {}, {"is_v31": True}, "was made without --v31: leave it out"),
        ("eagle3", {"draft_vocab_size": 40}, {}, "with --draft-vocab-size 40, not 128: give that"),
        ("eagle", {"num_layers": 2}, {}, "with --num-layers 2, not 1: give that"),
        ("hydra", {"has_prefix_layer": True}, {}, "was made with --prefix-layer: give it"),
        ("hydra", {"num_layers": 2}, {}, "with --num-layers 2, not 1: give that"),
        ("medusa", {"num_layers": 2}, {}, "with --num-layers 2, not 1: give that"),
        ("mtp", {"num_modules": 2}, {}, "with --num-modules 2, not 1: give that"),
        ("parallel_heads", {"depth": 2}, {}, "with --depth 2, not 3: give that"),
    ],
)
def test_an_option_that_differs_is_named(
    model: PreTrainedModel,
    tmp_path: Path,
    method: Method,
    there: dict[str, Any],
    here: dict[str, Any],
    text: str,
) -> None:
    folder = made(model, tmp_path, method, **there)
    with pytest.raises(ConfigError, match=f"--start-from {folder} .*{text}"):
        start_from(training_of(model, method, **here), folder, allow_pickled=False)
    start_from(training_of(model, method, **there), folder, allow_pickled=False)


@pytest.mark.parametrize("method", BESIDE_TARGET)
def test_what_is_compared_are_options(model: PreTrainedModel, method: Method) -> None:
    flags = {flag_of(field.name) for field in dataclasses.fields(DrafterRecipe)}
    assert options_of(training_of(model, method).drafter).keys() <= flags


def test_what_is_not_made_here_is_refused(model: PreTrainedModel, tmp_path: Path) -> None:
    parts = TargetParts.of(model)
    save_eagle(Eagle(parts, llama_layers(parts, 1), has_embeddings=True), tmp_path)
    text = r"embed_tokens\.weight is \(128, 16\), and not there in those that are trained here"
    with pytest.raises(ConfigError, match=text):
        start_from(training_of(model, "eagle"), tmp_path, allow_pickled=False)


@pytest.mark.parametrize("layout", ["published", "speculators"])
def test_a_module_is_of_the_targets_own_kind(
    model: PreTrainedModel, tmp_path: Path, layout: CheckpointLayout
) -> None:
    folder = made(model, tmp_path, "mtp", layout=layout)
    training = training_of(model, "mtp")
    start_from(training, folder, allow_pickled=False)
    wanted = load_drafter(folder, TargetParts.of(model))
    assert torch.equal(logits(model, training.drafter), logits(model, wanted))
    if layout == "speculators":
        edit(folder, "transformer_layer_config", num_hidden_layers=1, max_position_embeddings=64)
        start_from(training, folder, allow_pickled=False)
        edit(folder, "transformer_layer_config", rms_norm_eps=0.5)
        with pytest.raises(ConfigError, match=r"rms_norm_eps 0\.5, the target's 1e-06, and modules of"):
            start_from(training, folder, allow_pickled=False)


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_of_what_lies_in_the_targets_folder_it_is_the_methods_own(
    model: PreTrainedModel, target_folder: Path, tmp_path: Path, ending: str
) -> None:
    """Modules and files of two kinds of heads beside one another, which do not stand in each other's way."""
    first = {method: made(model, tmp_path / method, method) for method in ("mtp", "medusa", "hydra")}
    folder = tmp_path / "target"
    shutil.copytree(target_folder, folder)
    shutil.copyfile(first["mtp"] / "model.safetensors", folder / "mtp.safetensors")
    keys = json.loads((first["hydra"] / "config.json").read_text())
    edit(folder, **(keys | json.loads((folder / "config.json").read_text())))
    for method in ("medusa", "hydra"):
        tensors = load_file(first[method] / f"{method}_lm_head.safetensors")
        file = folder / f"{method}_lm_head.{ending}"
        save_file(tensors, file) if ending == "safetensors" else torch.save(tensors, file)
    for method, its_own in first.items():
        if ending == "pt" and method != "mtp":
            with pytest.raises(CheckpointError, match=f"{method}_lm_head.pt"):
                start_from(training_of(model, method), folder, allow_pickled=False)
        training = training_of(model, method)
        start_from(training, folder, allow_pickled=ending == "pt")
        wanted = load_drafter(its_own, TargetParts.of(model))
        assert torch.equal(logits(model, training.drafter), logits(model, wanted))


def test_what_is_trained_is_no_longer_the_files(model: PreTrainedModel, tmp_path: Path) -> None:
    """Tensors of safetensors are memory of the file until they are written to."""
    folder = made(model, tmp_path, "eagle3")
    training = training_of(model, "eagle3")
    start_from(training, folder, allow_pickled=False)
    before = {name: tensor.clone() for name, tensor in training.drafter.state_dict().items()}
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-(1 << 12), 2)
        file.write(np.ones(1 << 10, dtype=np.float32).tobytes())
    after = training.drafter.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_other_states_are_read_in_training(
    model: PreTrainedModel, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    """Those that the drafter reads which is gone on with."""
    first = made(model, tmp_path / "first", "hydra")
    edit(first, hidden_state_offset=2)
    recipe = DrafterRecipe(method="hydra", **(TINY | {"steps": 20}))
    chosen = options(target_folder, texts, tmp_path, start_from=first, keeps_hidden=True)
    report = train_drafter(recipe, chosen)
    assert len(report["acceptance"]["0.0"]["reached"]) == 3
    drafter = load_drafter(chosen.out, TargetParts.of(model))
    assert drafter.hidden_layers == (4,)
    before, after = (load_file(folder / "hydra_lm_head.safetensors") for folder in (first, chosen.out))
    assert not torch.equal(before["hydra_lm_head.0.weight"], after["hydra_lm_head.0.weight"])
    logged = [json.loads(line) for line in (chosen.work / "log.jsonl").read_text().splitlines()]
    assert logged[-1]["d1"] < logged[0]["d1"]


def test_a_window_that_comes_with_the_weights_is_for_shorter_rows(
    target_folder: Path, texts: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    """It counts where the drafter is served, so that rows may not be longer."""
    first = made(model, tmp_path / "first", "eagle")
    edit(first, layer_types=["sliding_attention"], sliding_window=8)
    chosen = options(target_folder, texts, tmp_path, start_from=first, eval_texts=0)
    with pytest.raises(ConfigError, match=r"attend to 8 positions .* at most 9$"):
        train_drafter(DrafterRecipe(method="eagle", **TINY), chosen)
    train_drafter(DrafterRecipe(method="eagle", **(TINY | {"row_length": 9})), chosen)


def test_a_run_is_not_gone_on_with_from_what_a_folder_holds_by_then(
    target_folder: Path, texts: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    """Settings that no checkpoint holds come from there: the rest would be trained as another drafter."""
    first = made(model, tmp_path / "first", "eagle3")
    recipe = DrafterRecipe(method="eagle3", **TINY)
    chosen = options(target_folder, texts, tmp_path, start_from=first, eval_texts=0)
    train_drafter(recipe, dataclasses.replace(chosen, stop_after_step=3))
    edit(first, norm_before_residual=True)
    with pytest.raises(ConfigError, match="holds a run with another --start-from: configuration or weights"):
        train_drafter(recipe, chosen)
