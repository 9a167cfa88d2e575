"""Medusa-2: heads and target trained together (Cai et al. 2024, section 2.2.2).

The loss is L_LM + lambda_0 sum_k lambda^k L_k (equation 2) with L_k of head k and lambda = `decay`. In the
first `heads_first` steps the heads learn alone; then the target joins in, at a lower learning rate and with a
warm-up of its own. L_LM is cross entropy to the text, or, where the text is the target's own (section
2.3.2), the divergence from what it was, which low-rank additions let us look at.

What comes of it is another target: what is served is exact to that one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdec.core.errors import ConfigError
from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.medusa import save_medusa
from specdec.drafters.checkpoints.registry import load_drafter
from specdec.drafters.medusa import Medusa
from specdec.model.adapter import save_adapter
from specdec.model.checkpoint import open_checkpoint
from training.divergence import divergence
from training.drafters.acceptance import evaluate_acceptance
from training.drafters.capture import Capture
from training.drafters.groundwork import Groundwork
from training.drafters.low_rank import LowRankAdditions
from training.drafters.objectives import medusa_losses, text_loss
from training.drafters.options import TrainOptions
from training.drafters.recipe import DrafterRecipe
from training.drafters.start import require_alike
from training.drafters.stored import save_language_model, stored_as
from training.optimization import ModuleRates
from training.progress import console

TARGET_FOLDER, ADAPTER_FOLDER, HEADS_FOLDER = "target", "adapter", "heads"


def joint_loss(
    target_loss: torch.Tensor, head_losses: list[torch.Tensor], *, weight: float, decay: float
) -> torch.Tensor:
    """The target's own loss, and ``weight`` times the heads', of which head k = 1, 2, ... counts decay^k."""
    heads = torch.stack([decay ** (k + 1) * loss for k, loss in enumerate(head_losses)]).sum()
    return target_loss + weight * heads


class JointTraining:
    """Target and heads."""

    def __init__(self, ground: Groundwork) -> None:
        recipe, model = ground.recipe, ground.model
        self._recipe = recipe
        self._is_mixed = ground.is_mixed
        self.model = model
        self.heads = Medusa(TargetParts.of(model), num_heads=recipe.depth, num_layers=recipe.num_layers)
        self.heads.start_from_target()
        self.heads.to(model.device)
        self.additions: LowRankAdditions | None = None
        if recipe.lora_rank:
            self.additions = LowRankAdditions(model, rank=recipe.lora_rank, alpha=recipe.lora_alpha)
        else:
            model.requires_grad_(requires_grad=True)

    @property
    def moving(self) -> nn.Module:
        """What is trained of the target."""
        return self.model if self.additions is None else self.additions

    def loss(self, tokens: torch.Tensor, *, heads_alone: bool) -> tuple[torch.Tensor, dict[str, float]]:
        """What to go down, and what to log, of int64 [B, T]."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self._is_mixed):
            with torch.set_grad_enabled(not heads_alone):
                final = self._final(tokens)
            losses = medusa_losses(self.heads, final, tokens)
            logged = {f"d{k + 1}": loss.item() for k, loss in enumerate(losses)}
            own = final.new_zeros(()) if heads_alone else self._target_loss(final, tokens)
        if not heads_alone:
            logged["target"] = own.item()
        recipe = self._recipe
        return joint_loss(own, losses, weight=recipe.heads_weight, decay=recipe.decay), logged

    def _final(self, tokens: torch.Tensor) -> torch.Tensor:
        base: Any = self.model.base_model
        final: torch.Tensor = base(tokens, use_cache=False).last_hidden_state
        return final

    def _target_loss(self, final: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.heads.target.logits(final)
        if self._recipe.target_loss == "text":
            return text_loss(logits, tokens)
        assert self.additions is not None, "the recipe has seen to it"
        with torch.no_grad(), self.additions.left_out():
            before = self.heads.target.logits(self._final(tokens))
        return divergence("forward_kl", before.float().flatten(0, 1), logits.float().flatten(0, 1)).mean()


def train_jointly(recipe: DrafterRecipe, options: TrainOptions) -> dict[str, Any]:
    """Train, or go on; OUT gets ``heads``, and ``target`` or ``adapter``.

    Raises:
        ConfigError: an option, a file of data, or the recipe for this target is wrong.
        CheckpointError: target or heads to start from cannot be read.
    """
    _check(recipe, options)
    ground = Groundwork.lay(recipe, options, trains_target=not recipe.lora_rank)
    training = JointTraining(ground)
    if options.start_from is not None:
        _start_from(training.heads, options)
    run = ground.begin_run(
        {"heads": training.heads, "target": training.moving},
        vocabulary_sizes=frozenset({training.heads.target.vocab_size}),
        rates={"target": ModuleRates(share=recipe.target_rate, first_step=recipe.heads_first)},
    )
    run.run(lambda number: run.accumulate(number, recipe.accumulate, _forward(ground, training)))
    _store(training, ground)
    acceptance: dict[str, Any] = {}
    if options.eval_texts:
        console.print("measuring acceptance on the fine-tuned target")
        training.heads.eval()
        acceptance = evaluate_acceptance(
            Capture(training.model, training.heads.hidden_layers),
            training.heads,
            ground.excerpts(),
            num_generated=ground.num_evaluated,
            num_drafted=recipe.depth,
            ends=ground.ends,
            seed=recipe.seed,
        )
    moved = (*training.heads.parameters(), *training.moving.parameters())
    return ground.report(run, sum(parameter.numel() for parameter in moved), acceptance)


def _check(recipe: DrafterRecipe, options: TrainOptions) -> None:
    if options.rounds_states:
        raise ConfigError("--keep-hidden does not go with medusa2: its states change in training")
    if options.stores_adapter and not recipe.lora_rank:
        raise ConfigError(
            "--store adapter needs --lora-rank: what full fine-tuning adds is as large as the target itself"
        )


def _start_from(heads: Medusa, options: TrainOptions) -> None:
    assert options.start_from is not None
    other = load_drafter(
        options.start_from, heads.target, kind="medusa", allow_pickled=options.allow_pickled_weights
    )
    require_alike(heads, other, options.start_from)
    heads.load_state_dict(other.state_dict())


def _forward(
    ground: Groundwork, training: JointTraining
) -> Callable[[int, int], tuple[torch.Tensor, dict[str, float]]]:
    def forward(step: int, part: int) -> tuple[torch.Tensor, dict[str, float]]:
        return training.loss(ground.batch(step, part), heads_alone=step < ground.recipe.heads_first)

    return forward


def _store(training: JointTraining, ground: Groundwork) -> None:
    """Write target and heads, and go on with the numbers that were written."""
    options, recipe = ground.options, ground.recipe
    dtype: torch.dtype = getattr(torch, options.stored_dtype)
    target = options.out / TARGET_FOLDER
    if options.stores_adapter:
        assert training.additions is not None, "that was checked"
        target = options.target
        save_adapter(
            options.out / ADAPTER_FOLDER,
            training.additions.pairs,
            rank=recipe.lora_rank,
            alpha=recipe.lora_alpha,
            base=target,
        )
        training.additions.settle(_dtype_of(target, training.model.dtype))
    else:
        if training.additions is not None:
            training.additions.settle(dtype)
        save_language_model(training.model, ground.tokenizer, target, dtype, options.target)
    with stored_as(training.heads, dtype):
        save_medusa(training.heads, options.out / HEADS_FOLDER, base_model=str(target))


def _dtype_of(folder: Path, otherwise: torch.dtype) -> torch.dtype:
    """In which a model's folder has its weights, to which a merged adapter is rounded."""
    config = open_checkpoint(folder).config
    stated = config.get("dtype", config.get("torch_dtype"))
    found = getattr(torch, stated, otherwise) if isinstance(stated, str) else otherwise
    assert isinstance(found, torch.dtype)
    return found
