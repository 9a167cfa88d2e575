"""Recipes learn from what the target says, where that is not what its LM head gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.drafters.base import FINAL_NORM
from tests.architectures import make_model, save_model
from tests.training.drafters.tiny_runs import TINY, options
from training.drafters.capture import Capture
from training.drafters.early_exits import EarlyExits
from training.drafters.groundwork import Groundwork
from training.drafters.joint import JointTraining
from training.drafters.recipe import DrafterRecipe, Method

TOKENS = torch.arange(24).reshape(2, 12) + 5


@pytest.mark.parametrize("architecture", ["granite", "cohere2", "gemma2"])
@torch.no_grad()
def test_captured_logits_are_the_targets(architecture: str) -> None:
    model = make_model(architecture)
    capture = Capture(model, (FINAL_NORM,))
    torch.testing.assert_close(capture.logits(capture.states(TOKENS)), model(TOKENS).logits)


def lay(method: Method, texts: Path, folder: Path, **changes: Any) -> tuple[Groundwork, PreTrainedModel]:
    """The groundwork of a recipe for a Granite, whose logits are a quarter of products, and its target."""
    target = folder / "target"
    save_model(target, "granite")
    recipe = DrafterRecipe(method=method, **(TINY | changes))
    ground = Groundwork.lay(recipe, options(target, texts, folder), trains_target=True)
    return ground, AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


def text_loss(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def test_early_exits_and_the_end_are_at_the_targets_temperature(texts: Path, tmp_path: Path) -> None:
    ground, model = lay("layerskip", texts, tmp_path)
    exits = EarlyExits(ground)
    early, final = exits.losses(TOKENS, torch.ones(3, 2, dtype=torch.bool), early_layer=1)
    base: Any = model.base_model
    with torch.no_grad():
        output = model(TOKENS, output_hidden_states=True)
        wanted = model.get_output_embeddings()(base.norm(output.hidden_states[2])) / 4.0
    torch.testing.assert_close(early, text_loss(wanted))
    torch.testing.assert_close(final, text_loss(output.logits))
    torch.testing.assert_close(exits.logits(TOKENS, 2), wanted)


def test_a_target_that_learns_with_its_heads_is_at_its_own_temperature(texts: Path, tmp_path: Path) -> None:
    ground, model = lay("medusa2", texts, tmp_path)
    _, logged = JointTraining(ground).loss(TOKENS, heads_alone=False)
    with torch.no_grad():
        wanted = text_loss(model(TOKENS).logits)
    assert logged["target"] == pytest.approx(wanted.item(), rel=1e-4)
