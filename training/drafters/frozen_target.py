"""Trains a drafter beside a target that stays as it is: hidden states, steps, evaluation, finished folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from specdec.attention.hf import UnsupportedAttention
from specdec.core.errors import ConfigError
from specdec.drafters.base import Drafter, TargetParts
from training.drafters.acceptance import evaluate_acceptance
from training.drafters.capture import Capture, KeptStates
from training.drafters.groundwork import Groundwork
from training.drafters.methods import Training, make_training, require_whole_rows
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
    ground = Groundwork.lay(recipe, options, check=partial(_require_trainable, recipe))
    counts = torch.bincount(ground.rows.tokens.flatten())
    training = make_training(recipe, TargetParts.of(ground.model), counts)
    if options.start_from is not None:
        start_from(training, options.start_from, allow_pickled=options.allow_pickled_weights)
        require_whole_rows(training.drafter, recipe)
    capture = Capture(ground.model, training.drafter.hidden_layers)
    drafter = training.drafter.to(ground.model.device)
    run = ground.begin_run(
        {"drafter": drafter},
        vocabulary_sizes=frozenset({capture.parts.vocab_size, _num_drafted_ids(training)}),
    )
    # Without dropout, which a target's layers may have: what it draws is in no checkpoint.
    drafter.eval()
    run.run(_steps(ground, training, capture, ground.kept_states(capture), run))
    with stored_as(drafter, getattr(torch, options.stored_dtype)):
        training.save(options.out, str(options.target), options.layout)
    acceptance: dict[str, Any] = {}
    if options.eval_texts:
        console.print("measuring acceptance")
        acceptance = _acceptance(ground, capture, drafter)
    return ground.report(run, sum(parameter.numel() for parameter in drafter.parameters()), acceptance)


def _require_trainable(recipe: DrafterRecipe, target: TargetParts) -> None:
    """Make the drafter and let go of it: what it is refused for is known only then."""
    with torch.random.fork_rng(devices=[]):  # what is trained later begins with what is drawn next
        make_training(recipe, target, torch.zeros(0, dtype=torch.int64))


def _acceptance(ground: Groundwork, capture: Capture, drafter: Drafter) -> dict[str, Any]:
    try:
        return evaluate_acceptance(
            capture,
            drafter,
            ground.excerpts(),
            num_generated=ground.num_evaluated,
            num_drafted=ground.recipe.depth,
            ends=ground.ends,
            seed=ground.recipe.seed,
        )
    except UnsupportedAttention as error:
        raise ConfigError(
            f"the drafter is in {ground.options.out}; its acceptance cannot be measured on texts so long: "
            f"{error}: give --eval-texts 0"
        ) from error


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
