"""What every recipe does: continue where it was, optimize step by step, log, save a checkpoint at times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from specdec.core.errors import ConfigError
from training.checkpointing import load_checkpoint, save_checkpoint
from training.optimization import (
    ORDINARY,
    ModuleRates,
    learning_rate_factor,
    make_optimizers,
    set_learning_rates,
)
from training.progress import TrainingLog
from training.tokenizer import CONTEXT_LENGTH


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How weights move, whatever the losses and rows are."""

    steps: int
    """Optimizer steps; the learning rate reaches zero after the last."""
    muon_lr: float
    adamw_lr: float
    weight_decay: float
    warmup_steps: int
    constant_share: float
    """Of the steps, after which learning rates go down in a line."""
    clip_norm: float = 1.0
    seed: int


@dataclass(frozen=True, kw_only=True)
class Recipe(Schedule):
    """What decides the weights of the demo family."""

    batch_tokens: int = 8192
    """Tokens per step, at both lengths."""
    short_length: int = 512
    """Row length of most steps, in tokens."""
    long_length: int = CONTEXT_LENGTH
    long_share: float
    """Share of the steps at ``long_length``: every other step of the last 2 x this share."""

    @property
    def long_from(self) -> int:
        """First step that may be at ``long_length``; from here on lengths alternate."""
        return self.steps - round(2 * self.long_share * self.steps)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a recipe is run; nothing of it changes the weights of a run that is completed."""

    work_folder: Path
    """Its checkpoint, ``checkpoint.pt``, is continued from."""
    compiled: bool = True
    checkpoint_every_s: float = 180.0
    stop_after_step: int | None = None
    """Stop early, as an interruption would."""


class TrainingRun:
    """One run of a recipe over ``modules``, from the folder's checkpoint on."""

    def __init__(
        self,
        name: str,
        recipe: Schedule,
        modules: dict[str, nn.Module],
        options: RunOptions,
        *,
        vocabulary_sizes: frozenset[int] = frozenset(),
        rates: Mapping[str, ModuleRates] | None = None,
    ) -> None:
        """``rates`` by name of a module, where they are not those of the recipe."""
        self._name = name
        self._recipe = recipe
        self._modules = modules
        self._options = options
        self._parameters = [p for module in modules.values() for p in module.parameters()]
        self._optimizers = make_optimizers(
            [(module, (rates or {}).get(name, ORDINARY)) for name, module in modules.items()],
            muon_lr=recipe.muon_lr,
            adamw_lr=recipe.adamw_lr,
            weight_decay=recipe.weight_decay,
            vocabulary_sizes=vocabulary_sizes,
        )
        self.generator = torch.Generator().manual_seed(recipe.seed)
        """For what a step draws; part of the checkpoint."""
        self._checkpoint = options.work_folder / "checkpoint.pt"
        self._first, self._before_s = load_checkpoint(
            self._checkpoint, modules=modules, optimizers=self._optimizers, generator=self.generator
        )
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds in all, those before an interruption included."""
        return self._before_s + time.monotonic() - self._started_s

    def run(
        self, step: Callable[[int], dict[str, float]], *, may_pause: Callable[[int], bool] = lambda _: True
    ) -> None:
        """Call ``step`` for every step that is left; it calls `optimize` and returns the losses to log.

        ``may_pause`` says of a number of finished steps whether a checkpoint would then have all that the
        rest of the run needs.
        """
        recipe, options = self._recipe, self._options
        last = recipe.steps if options.stop_after_step is None else min(recipe.steps, options.stop_after_step)
        saved_s = time.monotonic()
        log_file = options.work_folder / "log.jsonl"
        with TrainingLog(self._name, log_file, first=self._first, total=recipe.steps) as log:
            for number in range(self._first, last):
                log.record(number, step(number))
                num_done, now_s = number + 1, time.monotonic()
                is_due = now_s - saved_s > options.checkpoint_every_s and may_pause(num_done)
                if is_due or num_done == last:
                    saved_s = now_s
                    self._save(num_done)

    def optimize(self, loss: torch.Tensor, step: int) -> None:
        """Take one step down the gradient of ``loss``."""
        loss.backward()
        self.step_optimizers(step)

    def accumulate(
        self, step: int, num_parts: int, loss: Callable[[int, int], tuple[torch.Tensor, dict[str, float]]]
    ) -> dict[str, float]:
        """Take one step down the mean of ``loss(step, part)`` over parts; return means of what it logs."""
        means: dict[str, float] = {}
        for part in range(num_parts):
            value, logged = loss(step, part)
            (value / num_parts).backward()
            for name, number in logged.items():
                means[name] = means.get(name, 0.0) + number / num_parts
        self.step_optimizers(step)
        return means

    def step_optimizers(self, step: int) -> None:
        """Take one step down the gradients there are, and clear them.

        Raises:
            ConfigError: they are not finite. Weights would not be either, in this checkpoint and in all later
                ones.
        """
        recipe = self._recipe
        norm = nn.utils.clip_grad_norm_(self._parameters, recipe.clip_norm)
        if not torch.isfinite(norm):
            raise ConfigError(
                f"gradients of step {step + 1} are not finite, and nothing more would be learnt: give lower "
                "learning rates (--matrix-lr, --vector-lr) and another --work; the last checkpoint in "
                f"{self._options.work_folder} is of before"
            )
        factor = learning_rate_factor(step, recipe.steps, recipe.warmup_steps, recipe.constant_share)
        set_learning_rates(self._optimizers, factor, step, recipe.warmup_steps)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _save(self, num_done: int) -> None:
        save_checkpoint(
            self._checkpoint,
            step=num_done,
            elapsed_s=self.elapsed_s,
            modules=self._modules,
            optimizers=self._optimizers,
            generator=self.generator,
        )
