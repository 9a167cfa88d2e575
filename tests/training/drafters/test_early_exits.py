"""LayerSkip for a target that is there: losses, dropout, and what comes of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from specdec.core.errors import ConfigError
from specdec.core.sampling_params import SamplingParams
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from tests.training.drafters.tiny_runs import TINY, losses, options
from training.drafters.early_exits import EarlyExits
from training.drafters.groundwork import Groundwork
from training.drafters.recipe import DrafterRecipe
from training.drafters.train import train_drafter


def recipe(**changes: Any) -> DrafterRecipe:
    return DrafterRecipe(method="layerskip", **(TINY | {"target_rate": 0.5} | changes))


@pytest.fixture
def exits(target_folder: Path, texts: Path, tmp_path: Path) -> EarlyExits:
    return EarlyExits(Groundwork.lay(recipe(), options(target_folder, texts, tmp_path), trains_target=True))


def test_losses_without_dropout_are_those_of_the_model(exits: EarlyExits, model: PreTrainedModel) -> None:
    tokens = torch.arange(24).reshape(2, 12) + 5
    early, final = exits.losses(tokens, torch.ones(6, 2, dtype=torch.bool), early_layer=2)
    output = model(tokens, output_hidden_states=True)
    base: Any = model.base_model
    wanted = model.get_output_embeddings()(base.norm(output.hidden_states[3]))
    for loss, logits in ((early, wanted), (final, output.logits)):
        plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        torch.testing.assert_close(loss, plain)
    assert torch.equal(exits.logits(tokens, 3), wanted)
    torch.testing.assert_close(exits.model(tokens).logits, output.logits, msg="hooks do nothing outside")


def test_a_layer_that_is_left_out_passes_its_rows_through(exits: EarlyExits) -> None:
    tokens = torch.arange(24).reshape(2, 12) + 5
    kept = torch.ones(6, 2, dtype=torch.bool)
    kept[3:] = False
    early, final = exits.losses(tokens, kept, early_layer=2)
    torch.testing.assert_close(early, final)
    kept[3:, 1] = True
    one_of_two = exits.losses(tokens, kept, early_layer=2)[1]
    assert not torch.equal(one_of_two, final)


def test_early_exit_loss_trains_no_later_layer(exits: EarlyExits) -> None:
    exits.model.requires_grad_(requires_grad=True)
    tokens = torch.arange(24).reshape(2, 12) + 5
    exits.losses(tokens, torch.ones(6, 2, dtype=torch.bool), early_layer=1)[0].backward()
    base: Any = exits.model.base_model
    assert [layer.mlp.down_proj.weight.grad is not None for layer in base.layers] == [True] * 2 + [False] * 4


def test_first_layers_learn_to_draft(target_folder: Path, texts: Path, tmp_path: Path) -> None:
    report = train_drafter(
        recipe(steps=40, muon_lr=0.05, adamw_lr=0.05), options(target_folder, texts, tmp_path)
    )
    logged = losses(tmp_path)
    assert logged[-1]["early"] < logged[0]["early"]
    assert logged[-1]["final"] < logged[0]["final"]
    reached = report["acceptance"]["0.0"]["reached"]
    assert len(reached) == 3
    assert reached == sorted(reached, reverse=True)
    out = tmp_path / "out"
    assert AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == 6

    def run(**speculative: Any) -> list[tuple[int, ...]]:
        target = {"model": str(out), "dtype": "float32"}
        config = EngineConfig.model_validate({"target": target, "speculative_config": speculative})
        with Engine(config) as engine:
            params = SamplingParams(max_tokens=12, temperature=0.7, seed=1)
            return [one.token_ids for one in engine.generate([[70, 71], [72, 73, 74]], params)]

    drafted = run(method="layerskip", exit_layer=3, num_speculative_tokens=3)
    assert drafted == run(method="none")


@pytest.mark.full
def test_an_interrupted_run_ends_with_the_same_weights(
    target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    def run(name: str, **changes: Any) -> dict[str, torch.Tensor]:
        chosen = options(target_folder, texts, tmp_path / name, eval_texts=0, **changes)
        train_drafter(recipe(layer_dropout=0.5, accumulate=2), chosen)
        return load_file(chosen.out / "model.safetensors")

    straight = run("straight")
    early = run("resumed", stop_after_step=3)
    resumed = run("resumed")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    assert not all(torch.equal(tensor, early[name]) for name, tensor in straight.items())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"keeps_hidden": True}, "its states change in training"),
        ({"start_from": Path("x")}, "give that folder as --target"),
    ],
)
def test_options_that_make_no_sense(
    target_folder: Path, texts: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        train_drafter(recipe(), options(target_folder, texts, tmp_path, **changes))


def test_recipes_that_do_not_fit(target_folder: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--exit-layer 6: the target has 6 layers, give 1 to 5"):
        train_drafter(recipe(exit_layer=6), options(target_folder, texts, tmp_path))
    with pytest.raises(ConfigError, match="--layer-dropout must be from 0 to 1"):
        recipe(layer_dropout=1.5)
    small = tmp_path / "small"
    config = LlamaConfig.from_pretrained(target_folder)
    config.num_hidden_layers = 2
    AutoModelForCausalLM.from_config(config).save_pretrained(small)
    for file in target_folder.glob("tokenizer*"):
        (small / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="must have 3 layers at least"):
        train_drafter(recipe(), options(small, texts, tmp_path))
