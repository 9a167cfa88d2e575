"""Medusa-2: what is trained when, what is written, and that what is served is the fine-tuned target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from deploy.cli.main import app
from specdec.core.errors import ConfigError
from specdec.core.sampling_params import SamplingParams
from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.medusa import save_medusa
from specdec.drafters.checkpoints.registry import load_drafter
from specdec.drafters.medusa import Medusa
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from tests.specdec.drafters import published
from tests.training.drafters.tiny_runs import TINY, losses, options
from training.drafters.joint import joint_loss
from training.drafters.low_rank import LowRankAdditions
from training.drafters.recipe import DrafterRecipe
from training.drafters.train import train_drafter


def recipe(**changes: Any) -> DrafterRecipe:
    return DrafterRecipe(method="medusa2", **(TINY | {"target_rate": 0.5} | changes))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_loss_is_the_papers() -> None:
    total = joint_loss(torch.tensor(2.0), [torch.tensor(1.0), torch.tensor(4.0)], weight=0.5, decay=0.5)
    assert total.item() == pytest.approx(2.0 + 0.5 * (0.5 * 1.0 + 0.25 * 4.0))


def test_heads_learn_alone_before_the_target_joins_in(
    target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    before = weights(target_folder)
    chosen = options(target_folder, texts, tmp_path, eval_texts=0, stop_after_step=2)
    joint = recipe(steps=42, heads_first=2)
    train_drafter(joint, chosen)
    alone = weights(tmp_path / "out" / "target")
    assert all(torch.equal(tensor, alone[name]) for name, tensor in before.items())
    chosen = options(target_folder, texts, tmp_path, eval_texts=2)
    report = train_drafter(joint, chosen)
    after = weights(tmp_path / "out" / "target")
    assert set(after) == set(before)
    assert not any(torch.equal(tensor, after[name]) for name, tensor in before.items())
    logged = losses(tmp_path)
    assert logged[-1]["d1"] < logged[0]["d1"]
    assert logged[-1]["target"] < logged[0]["target"]
    assert len(report["acceptance"]["0.7"]["reached"]) == 3


@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.full)])
def test_an_interrupted_run_ends_with_the_same_weights(
    target_folder: Path, texts: Path, tmp_path: Path, rank: int
) -> None:
    joint = recipe(lora_rank=rank, heads_first=1, accumulate=2)

    def run(name: str, **changes: Any) -> dict[str, torch.Tensor]:
        train_drafter(joint, options(target_folder, texts, tmp_path / name, eval_texts=0, **changes))
        return weights(tmp_path / name / "out" / "target")

    straight = run("straight")
    early = run("resumed", stop_after_step=3)
    resumed = run("resumed")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in straight.items())
    assert not all(torch.equal(tensor, early[name]) for name, tensor in straight.items())


def test_an_adapter_makes_the_target_that_would_have_been_written(
    target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    joint = recipe(lora_rank=2, target_loss="self")
    train_drafter(joint, options(target_folder, texts, tmp_path / "whole", eval_texts=0))
    chosen = options(target_folder, texts, tmp_path / "added", eval_texts=0, stores_adapter=True)
    train_drafter(joint, chosen)
    made = CliRunner().invoke(
        app,
        [
            *("merge", "--base", str(target_folder), "--adapter", str(chosen.out / "adapter")),
            *("--out", str(tmp_path / "merged")),
        ],
    )
    assert made.exit_code == 0, made.output
    merged, whole = weights(tmp_path / "merged"), weights(tmp_path / "whole" / "out" / "target")
    before = weights(target_folder)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in merged.items())
    moved = {name for name, tensor in merged.items() if not torch.equal(tensor, before[name])}
    assert moved == {f"{name}.weight" for name in added_to(chosen.out / "adapter")}
    assert not (chosen.out / "target").exists()


def added_to(adapter: Path) -> set[str]:
    names = load_file(adapter / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in names}


def test_held_to_what_it_was_the_target_does_not_move_at_first(
    model: PreTrainedModel, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    """With nothing added yet the divergence from the original is zero."""
    additions = LowRankAdditions(model, rank=2, alpha=4.0)
    tokens = torch.arange(12)[None] + 5
    plain = model(tokens).logits
    with torch.no_grad():
        additions.ups[3].fill_(1.0)
    changed = model(tokens).logits
    with additions.left_out():
        left_out = model(tokens).logits
    assert not torch.equal(changed, plain)
    assert torch.equal(left_out, plain)
    additions.settle(torch.float32)
    torch.testing.assert_close(model(tokens).logits, changed)
    train_drafter(
        recipe(lora_rank=2, target_loss="self", steps=11),
        options(target_folder, texts, tmp_path, eval_texts=0),
    )
    assert losses(tmp_path)[0]["target"] < 0.2


def test_what_is_served_is_the_fine_tuned_target(
    model: PreTrainedModel, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    train_drafter(recipe(steps=10), options(target_folder, texts, tmp_path, eval_texts=0))
    target, heads = tmp_path / "out" / "target", tmp_path / "out" / "heads"
    speculative = {"method": "medusa", "model": str(heads), "num_speculative_tokens": 3}

    def run(folder: Path, **changes: Any) -> list[tuple[int, ...]]:
        settings = {"target": {"model": str(folder), "dtype": "float32"}, **changes}
        with Engine(EngineConfig.model_validate(settings)) as engine:
            prompts = [[70 + i, 71 + i, 72 + i] for i in range(3)]
            params = [SamplingParams(max_tokens=16, temperature=t, seed=3) for t in (0.0, 0.7, 1.0)]
            return [one.token_ids for one in engine.generate(prompts, params)]

    alone = run(target)
    assert run(target, speculative_config=speculative) == alone
    assert run(target_folder) != alone, "the base is another model"
    assert load_drafter(heads, TargetParts.of(model)).max_depth == 3
    assert json.loads((heads / "config.json").read_text())["base_model_name_or_path"] == str(target)
    assert AutoModelForCausalLM.from_pretrained(target).config.num_hidden_layers == 6


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"target_loss": "self"}, "--target-loss self needs --lora-rank"),
        ({"heads_first": 6}, r"--heads-first must be from 0 to one less than --steps \(6\)"),
        ({"lora_rank": -1}, "--lora-rank must be at least 1, or 0"),
        ({"lora_alpha": 8.0}, "--lora-alpha scales what --lora-rank adds: give both, or leave it out"),
        ({"exit_layer": 2}, "--exit-layer is of method layerskip, not of medusa2"),
    ],
)
def test_recipes_that_make_no_sense(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        recipe(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"keeps_hidden": True}, "its states change in training"),
        ({"stores_adapter": True}, "--store adapter needs --lora-rank"),
        ({"layout": "speculators"}, "does not hold medusa2"),
    ],
)
def test_options_that_make_no_sense(
    target_folder: Path, texts: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        train_drafter(recipe(), options(target_folder, texts, tmp_path, **changes))


def converted(folder: Path, *, without: str) -> Path:
    """Heads of the right depth and layers as they are converted for vLLM, but for one kind of tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(3):
        shapes[f"blocks.{head}.layers.0.weight"] = (16, 16)
        shapes[f"blocks.{head}.layers.0.bias"] = (16,)
        shapes[f"lm_heads.{head}.weight"] = (128, 16)
    kept = {name: torch.zeros(shape) for name, shape in shapes.items() if without not in name}
    keys = {"num_heads": 3, "num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 128}
    return published.write(folder, keys, kept, published.MODEL)


@pytest.mark.parametrize(
    ("without", "text"),
    [
        ("lm_heads", r"heads\.0\.1\.weight is not there, and \(128, 16\) in those that are trained here"),
        ("bias", r"heads\.0\.0\.linear\.bias is not there, and \(16,\) in those that are trained here"),
    ],
)
def test_heads_to_start_from_that_are_put_together_otherwise(
    target_folder: Path, texts: Path, tmp_path: Path, without: str, text: str
) -> None:
    folder = converted(tmp_path / "heads", without=without)
    with pytest.raises(ConfigError, match=f"--start-from {folder}: {text}: leave it out"):
        train_drafter(recipe(), options(target_folder, texts, tmp_path, start_from=folder))


def test_another_depth_of_heads_to_start_from_is_named(
    model: PreTrainedModel, target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "heads"
    save_medusa(Medusa(TargetParts.of(model), num_heads=2), folder, base_model="target")
    with pytest.raises(ConfigError, match=f"--start-from {folder} was made with --depth 2, not 3: give that"):
        train_drafter(recipe(), options(target_folder, texts, tmp_path, start_from=folder))


@pytest.mark.full
def test_heads_can_be_started_from_those_of_medusa_1(
    target_folder: Path, texts: Path, tmp_path: Path
) -> None:
    first = options(target_folder, texts, tmp_path / "first", eval_texts=0)
    train_drafter(DrafterRecipe(method="medusa", **(TINY | {"steps": 30})), first)
    anew = options(target_folder, texts, tmp_path / "anew", eval_texts=0)
    further = options(target_folder, texts, tmp_path / "further", eval_texts=0, start_from=first.out)
    for one in (anew, further):
        train_drafter(recipe(steps=10), one)
    assert losses(tmp_path / "further")[0]["d3"] < losses(tmp_path / "anew")[0]["d3"]
    wider = options(target_folder, texts, tmp_path / "wider", eval_texts=0, start_from=first.out)
    with pytest.raises(ConfigError, match="was made with --depth 3, not 4: give that"):
        train_drafter(recipe(depth=4), wider)
