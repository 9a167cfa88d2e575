from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from training.layerskip import draw_kept_rows, exit_scale, exit_weights, layer_dropout_rates, rotating_exit
from training.target import TargetRecipe, TargetTraining


def test_dropout_grows_with_depth_and_time() -> None:
    assert layer_dropout_rates(8, 0.1, progress=0.0) == [0.0] * 8
    middle, end = layer_dropout_rates(8, 0.1, progress=0.5), layer_dropout_rates(8, 0.1, progress=1.0)
    assert end[0] == 0.0
    assert end[-1] == pytest.approx(0.1)
    assert end == sorted(end)
    assert all(early <= late for early, late in zip(middle, end, strict=True))


def test_kept_rows_follow_the_rates() -> None:
    generator = torch.Generator().manual_seed(0)
    kept = draw_kept_rows([0.0, 0.25, 1.0], 20_000, generator)
    shares = kept.float().mean(dim=1)
    assert shares[0] == 1.0
    assert shares[1] == pytest.approx(0.75, abs=0.02)
    assert shares[2] == 0.0


def test_exit_weights_follow_the_paper() -> None:
    assert exit_scale(2, 4, early_scale=0.5) == 1.5
    assert exit_scale(3, 4, early_scale=0.5) == 3 + 0.5 * 3
    early, final = exit_weights(2, 4, early_scale=0.5)
    assert early + final == pytest.approx(1.0)
    assert early == pytest.approx(1.5 / 6.0)


def test_every_scaled_exit_gets_its_turn() -> None:
    assert {rotating_exit(step, 8) for step in range(6)} == {1, 2, 3, 4, 5, 6}


def test_a_dropped_layer_passes_its_rows_through(tiny_config: LlamaConfig) -> None:
    torch.manual_seed(0)
    training = TargetTraining(tiny_config, TargetRecipe(steps=1))
    tokens = torch.randint(6, 64, (3, 12))
    kept = torch.ones(4, 3, dtype=torch.bool)
    whole = training.losses(tokens, kept, early_layer=2)["final"]
    kept[3] = False
    without_last = training.losses(tokens, kept, early_layer=2)
    assert without_last["final"] == without_last["early"]
    assert not torch.equal(without_last["final"], whole)


def test_early_exit_loss_trains_no_later_layer(tiny_config: LlamaConfig) -> None:
    training = TargetTraining(tiny_config, TargetRecipe(steps=1))
    tokens = torch.from_numpy(np.random.default_rng(0).integers(6, 64, size=(2, 12)))
    training.losses(tokens, torch.ones(4, 2, dtype=torch.bool), early_layer=1)["early"].backward()
    reached = [layer.mlp.down_proj.weight.grad is not None for layer in training.target.model.layers]
    assert reached == [True, True, False, False]


def test_losses_match_the_plain_model(tiny_config: LlamaConfig) -> None:
    training = TargetTraining(tiny_config, TargetRecipe(steps=1))
    tokens = torch.randint(6, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    ours = training.losses(tokens, torch.ones(4, 2, dtype=torch.bool), early_layer=1)["final"]
    training.target.config._attn_implementation = "eager"
    logits = training.target(tokens[:, :-2]).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:-1].flatten())
    torch.testing.assert_close(ours, theirs)
