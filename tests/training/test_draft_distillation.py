"""The rows that the demo draft is distilled on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from training.draft_distillation import DraftRecipe, DraftTraining


def test_samples_that_were_cut_off_are_made_anew(
    tmp_path: Path,
    tiny_config: LlamaConfig,
    tiny_documents: list[np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(5)
    recipe = DraftRecipe(prompt_length=3, sample_length=5, target_pool_rows=8)
    training = DraftTraining(recipe, LlamaForCausalLM(tiny_config), tiny_config, tiny_documents * 4)
    file = tmp_path / "work" / "target_samples.npy"
    whole = np.save

    def cut(opened: Any, rows: Any) -> None:
        opened.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", cut)
    with pytest.raises(KeyboardInterrupt):
        training.fill_target_pool(file)
    assert not file.exists()
    monkeypatch.setattr(np, "save", whole)
    training.fill_target_pool(file)
    made = training._target_pool
    assert made.shape[1] == recipe.generated_length
    assert list(file.parent.iterdir()) == [file]
    monkeypatch.setattr(np, "save", cut)
    training.fill_target_pool(file)
    assert torch.equal(training._target_pool, made)
