"""LayerSkip for a target that is there already (Elhoushi et al. 2024, section 4.1): its first layers draft.

Layer dropout, and beside the last layer's loss that of one early exit a step, in turn, behind the target's
own norm and head. For weights that were trained before, dropout does not grow with the steps (S(t) = 1).
What comes of it is another target: what is served is exact to that one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from specdec.core.errors import ConfigError
from specdec.drafters.base import TargetParts
from specdec.model.layer_map import LayerMap
from specdec.model.parallel.plan import UnsupportedParallelism
from specdec.model.parallel.stages import layer_stack
from training.drafters.acceptance import evaluate_language_model
from training.drafters.groundwork import Groundwork
from training.drafters.objectives import text_loss
from training.drafters.options import TrainOptions
from training.drafters.recipe import DrafterRecipe
from training.drafters.stored import save_language_model
from training.layerskip import draw_kept_rows, exit_weights, layer_dropout_rates, rotating_exit
from training.optimization import ModuleRates
from training.progress import console
from training.run import TrainingRun

_FEWEST_LAYERS = 3
"""With an exit between the first layer and the last."""


@dataclass(slots=True)
class _Pass:
    """One forward: which rows run which layers, and what one of them returns."""

    early_layer: int
    kept: torch.Tensor | None = None
    """bool [L, B]; None: all run all."""
    early: torch.Tensor | None = field(default=None, init=False)
    """[B, T, H] behind ``early_layer``."""


class EarlyExits:
    """A target whose layers can be left out for some rows, and looked behind, by hooks."""

    def __init__(self, ground: Groundwork) -> None:
        """Take the target of ``ground``.

        Raises:
            ConfigError: it has too few layers, or they are not in one list.
        """
        self.model = ground.model
        self.parts = TargetParts.of(ground.model)
        self._is_mixed = ground.is_mixed
        try:
            _, self._layers = layer_stack(ground.model)
        except UnsupportedParallelism as error:
            raise ConfigError(f"layerskip does not go with this target: {error}") from error
        self.num_layers = len(self._layers)
        does_all = LayerMap.of_model(ground.model.config).num_original_layers == self.num_layers
        if self.num_layers < _FEWEST_LAYERS or not does_all:
            raise ConfigError(
                f"layerskip: {ground.options.target} must have {_FEWEST_LAYERS} layers at least, none "
                "of them inserted ones that do nothing"
            )
        self._pass: _Pass | None = None
        for index, layer in enumerate(self._layers):
            layer.register_forward_hook(self._hook(index))

    def losses(
        self, tokens: torch.Tensor, kept: torch.Tensor, early_layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross entropies to int64 [B, T] behind ``early_layer`` and the last; ``kept`` bool [L, B]."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self._is_mixed):
            final, early = self._run(tokens, _Pass(early_layer, kept))
            return text_loss(self._logits(early), tokens), text_loss(self.parts.logits(final), tokens)

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, num_layers: int) -> torch.Tensor:
        """[B, T, V]: what the first layers say."""
        return self._logits(self._run(tokens, _Pass(num_layers - 1))[1])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.parts.logits(self.parts.final_norm(hidden))

    def _run(self, tokens: torch.Tensor, this: _Pass) -> tuple[torch.Tensor, torch.Tensor]:
        base: Any = self.model.base_model
        self._pass = this
        try:
            final: torch.Tensor = base(tokens, use_cache=False).last_hidden_state
        finally:
            self._pass = None
        assert this.early is not None, "every layer is called"
        return final, this.early

    def _hook(self, index: int) -> Any:
        def leave_out(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> Any:
            this = self._pass
            if this is None:
                return output
            hidden = output[0] if isinstance(output, tuple) else output
            if this.kept is not None and not bool(this.kept[index].all()):
                stays = this.kept[index].to(hidden.device)[:, None, None]
                hidden = torch.where(stays, hidden, inputs[0])
            if index == this.early_layer:
                this.early = hidden
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return leave_out


def train_early_exits(recipe: DrafterRecipe, options: TrainOptions) -> dict[str, Any]:
    """Train, or go on; OUT is the target that comes of it.

    Raises:
        ConfigError: an option, a file of data, or the recipe for this target is wrong.
        CheckpointError: the target cannot be read.
    """
    _check(options)
    ground = Groundwork.lay(recipe, options, trains_target=True)
    exits = EarlyExits(ground)
    exit_layer = _measured_exit(recipe, exits.num_layers)
    ground.model.requires_grad_(requires_grad=True)
    run = ground.begin_run(
        {"target": ground.model},
        vocabulary_sizes=frozenset({exits.parts.vocab_size}),
        rates={"target": ModuleRates(share=recipe.target_rate)},
    )
    run.run(lambda number: run.accumulate(number, recipe.accumulate, _forward(ground, exits, run)))
    stored_dtype = getattr(torch, options.stored_dtype)
    save_language_model(ground.model, ground.tokenizer, options.out, stored_dtype, options.target)
    acceptance: dict[str, Any] = {}
    if options.eval_texts:
        console.print(f"measuring acceptance of the first {exit_layer} layers")
        acceptance = evaluate_language_model(
            ground.model,
            lambda text: exits.logits(text, exit_layer),
            ground.excerpts(),
            num_generated=ground.num_evaluated,
            num_drafted=recipe.depth,
            ends=ground.ends,
            seed=recipe.seed,
        )
    num_parameters = sum(parameter.numel() for parameter in ground.model.parameters())
    return ground.report(run, num_parameters, acceptance)


def _check(options: TrainOptions) -> None:
    if options.rounds_states:
        raise ConfigError("--keep-hidden does not go with layerskip: its states change in training")
    if options.start_from is not None:
        raise ConfigError("--start-from does not go with layerskip: give that folder as --target")


def _measured_exit(recipe: DrafterRecipe, num_layers: int) -> int:
    chosen = num_layers // 2 if recipe.exit_layer is None else recipe.exit_layer
    if not 1 <= chosen < num_layers:
        raise ConfigError(
            f"--exit-layer {chosen}: the target has {num_layers} layers, give 1 to {num_layers - 1}"
        )
    return chosen


def _forward(
    ground: Groundwork, exits: EarlyExits, run: TrainingRun
) -> Callable[[int, int], tuple[torch.Tensor, dict[str, float]]]:
    recipe = ground.recipe
    rates = layer_dropout_rates(exits.num_layers, recipe.layer_dropout, progress=1.0)

    def forward(step: int, part: int) -> tuple[torch.Tensor, dict[str, float]]:
        early_layer = rotating_exit(step, exits.num_layers)
        kept = draw_kept_rows(rates, recipe.batch_rows, run.generator)
        early, final = exits.losses(ground.batch(step, part), kept, early_layer)
        early_weight, final_weight = exit_weights(early_layer, exits.num_layers, recipe.exit_scale)
        return early_weight * early + final_weight * final, {"early": early.item(), "final": final.item()}

    return forward
