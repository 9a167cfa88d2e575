"""Trains a drafter beside a target that stays as it is: hidden states, steps, evaluation, finished folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specdec.attention.hf import UnsupportedAttention
from specdec.core.errors import ConfigError
from specdec.drafters.base import TargetParts
from training.drafters.acceptance import evaluate_acceptance
from training.drafters.capture import Capture, KeptStates
from training.drafters.groundwork import Groundwork
from training.drafters.methods import Training, make_training
from training.drafters.objectives import TargetRows
from training.drafters.options import TrainOptions
from training.drafters.recipe import DrafterRecipe
from training.drafters.start import start_from
from training.drafters.stored import stored_as
from training.progress import console
from training.run import TrainingRun


def train_beside_target(recipe: DrafterRecipe, options: TrainOptions) -> dict[str, Any]:
    """Train, or go on, and return the measured acceptance.

    Raises:
        ConfigError: an option, a file of data, or the recipe for this target is wrong.
        CheckpointError: the target cannot be read.
    """
    ground = Groundwork.lay(recipe, options)
    counts = torch.bincount(ground.rows.tokens.flatten())
    training = make_training(recipe, TargetParts.of(ground.model), counts)
    if options.start_from is not None:
        start_from(training, options.start_from, allow_pickled=options.allow_pickled_weights)
    capture = Capture(ground.model, training.drafter.hidden_layers)
    drafter = training.drafter.to(ground.model.device)
    run = ground.begin_run(
        {"drafter": drafter},
        vocabulary_sizes=frozenset({capture.parts.vocab_size, _num_drafted_ids(training)}),
    )
    # Without dropout, which a target's layers may have: what it draws is in no checkpoint.
    drafter.eval()
    try:
        run.run(_steps(ground, training, capture, ground.kept_states(capture), run))
    except UnsupportedAttention as error:
        raise ConfigError(f"{recipe.method} cannot be trained for this target: {error}") from error
    with stored_as(drafter, getattr(torch, options.stored_dtype)):
        training.save(options.out, str(options.target), options.layout)
    acceptance: dict[str, Any] = {}
    if options.eval_texts:
        console.print("measuring acceptance")
        acceptance = evaluate_acceptance(
            capture,
            drafter,
            ground.excerpts(),
            num_generated=ground.num_evaluated,
            num_drafted=recipe.depth,
            ends=ground.ends,
            seed=recipe.seed,
        )
    return ground.report(run, sum(parameter.numel() for parameter in drafter.parameters()), acceptance)


def _steps(
    ground: Groundwork, training: Training, capture: Capture, kept: KeptStates | None, run: TrainingRun
) -> Callable[[int], dict[str, float]]:
    recipe, rows = ground.recipe, ground.rows
    device = capture.model.device

    def target_rows(number: int) -> TargetRows:
        indices = rows.indices(number)
        tokens = rows.tokens[indices]
        states = capture.states(tokens) if kept is None else kept.states(indices)
        reads = states.dtype if ground.is_mixed else torch.float32
        return TargetRows(
            tokens=tokens.to(device),
            hidden=capture.hidden(states).to(reads),
            final=capture.final(states),
            logits=capture.logits(states),
        )

    def forward(number: int, part: int) -> tuple[torch.Tensor, dict[str, float]]:
        batch = target_rows(number * recipe.accumulate + part)
        with torch.autocast(device.type, torch.bfloat16, enabled=ground.is_mixed):
            return training.loss(batch, run.generator)

    return lambda number: run.accumulate(number, recipe.accumulate, forward)


def _num_drafted_ids(training: Training) -> int:
    vocabulary = training.drafter.vocabulary
    return training.drafter.target.vocab_size if vocabulary is None else vocabulary.size
