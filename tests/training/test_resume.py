from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from training.draft_distillation import REFRESH_STEPS, DraftRecipe, row_kind, train_draft
from training.run import RunOptions
from training.target import TargetRecipe, train_target


def test_interrupted_target_run_ends_with_the_same_weights(
    tmp_path: Path, tiny_config: LlamaConfig, tiny_recipe: TargetRecipe, tiny_documents: list[np.ndarray]
) -> None:
    def run(folder: str, stop_after_step: int | None = None) -> dict[str, torch.Tensor]:
        training, _ = train_target(
            tiny_recipe,
            tiny_config,
            tiny_documents,
            RunOptions(work_folder=tmp_path / folder, compiled=False, stop_after_step=stop_after_step),
        )
        return training.state_dict()

    straight = run("straight")
    run("resumed", stop_after_step=4)
    resumed = run("resumed")
    for name, tensor in straight.items():
        assert torch.equal(tensor, resumed[name]), name


def test_interrupted_draft_run_ends_with_the_same_weights(
    tmp_path: Path, tiny_config: LlamaConfig, tiny_documents: list[np.ndarray]
) -> None:
    recipe = DraftRecipe(
        steps=2 * REFRESH_STEPS,
        batch_tokens=32,
        short_length=8,
        long_length=16,
        prompt_length=3,
        sample_length=5,
        target_pool_rows=8,
        warmup_steps=2,
        generated_share=0.8,
    )
    tiny_documents = tiny_documents * 4
    torch.manual_seed(5)
    weights = LlamaForCausalLM(tiny_config).state_dict()

    def run(folder: str, stop_after_step: int | None = None) -> dict[str, torch.Tensor]:
        target = LlamaForCausalLM(LlamaConfig.from_dict(tiny_config.to_dict()))
        target.load_state_dict(weights)
        draft, _ = train_draft(
            recipe,
            target,
            LlamaConfig.from_dict(tiny_config.to_dict()),
            tiny_documents,
            RunOptions(work_folder=tmp_path / folder, compiled=False, stop_after_step=stop_after_step),
        )
        return draft.state_dict()

    straight = run("straight")
    run("resumed", stop_after_step=REFRESH_STEPS)
    resumed = run("resumed")
    for name, tensor in straight.items():
        assert torch.equal(tensor, resumed[name]), name


def test_draft_steps_mix_all_kinds_of_rows() -> None:
    recipe = DraftRecipe(steps=1000)
    kinds = [row_kind(step, recipe) for step in range(1000)]
    assert set(kinds[: recipe.generated_from]) == {"corpus"}
    assert abs(kinds.count("long") - 100) <= 1
    assert kinds.count("draft") == 2 * kinds.count("target") or abs(kinds.count("draft") - 167) <= 2
