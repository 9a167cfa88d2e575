"""The target's recipe: next-token loss with LayerSkip (layer dropout, early-exit loss) and one MTP module."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from training import blocked_attention
from training.architecture import demo_llama
from training.layerskip import draw_kept_rows, exit_weights, layer_dropout_rates, rotating_exit
from training.mtp import MultiTokenPrediction
from training.packing import PackedBatches
from training.run import Recipe, RunOptions, TrainingRun
from training.tokenizer import SEPARATOR_ID


@dataclass(frozen=True, kw_only=True)
class TargetRecipe(Recipe):
    """Everything that decides the target's weights."""

    steps: int = 2000
    long_share: float = 0.11
    muon_lr: float = 3e-3
    adamw_lr: float = 3e-3
    weight_decay: float = 0.1
    warmup_steps: int = 60
    constant_share: float = 0.3
    layer_dropout: float = 0.1
    """LayerSkip's p_max."""
    exit_scale: float = 0.5
    """LayerSkip's e_scale."""
    mtp_weight: float = 0.3
    """Weight of the MTP loss at the start ..."""
    mtp_weight_end: float = 0.1
    """... and in the last third of the run."""
    seed: int = 1


def target_config() -> LlamaConfig:
    """The demo target's architecture."""
    return demo_llama(hidden_size=256, num_layers=8, num_heads=4, num_kv_heads=2, intermediate_size=640)


def cross_entropy(normed: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean loss in nats of [N, H] normed hidden states against [N] labels through the [V, H] head."""
    return F.cross_entropy((normed @ head.t()).float(), labels)


class TargetTraining(nn.Module):
    """Target and MTP module with the training losses; call ``compile_blocks`` once for speed."""

    def __init__(self, config: LlamaConfig, recipe: TargetRecipe) -> None:
        super().__init__()
        self.recipe = recipe
        config._attn_implementation = blocked_attention.NAME
        self.target = LlamaForCausalLM(config)
        self.mtp = MultiTokenPrediction(config)
        self._cross_entropy = cross_entropy

    def compile_blocks(self) -> None:
        """Compile the decoder block (one graph for all layers) and the head loss."""
        for block in (*self.target.model.layers, self.mtp.block):
            block.compile(dynamic=False)
        self._cross_entropy = torch.compile(cross_entropy, dynamic=False)

    def _loss(self, normed: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        head = self.target.lm_head.weight
        if torch.is_autocast_enabled("cpu"):
            head = head.to(torch.bfloat16)
            normed = normed.to(torch.bfloat16)
        return self._cross_entropy(normed.flatten(0, 1), head, labels.flatten())

    def losses(self, tokens: torch.Tensor, kept: torch.Tensor, early_layer: int) -> dict[str, torch.Tensor]:
        """Losses of int64 [B, T + 2] tokens.

        ``kept`` bool [L, B] says which rows run each layer; ``early_layer`` is the step's early exit.
        Keys: ``final``, ``early``, ``mtp``.
        """
        model = self.target.model
        inputs, labels, later_labels = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
        embeddings = model.embed_tokens(tokens[:, :-1])
        hidden = embeddings[:, :-1]
        rotary = model.rotary_emb(hidden, torch.arange(inputs.shape[1]).unsqueeze(0))
        early = hidden
        for index, block in enumerate(model.layers):
            output = block(hidden, position_embeddings=rotary)
            keep = kept[index]
            hidden = output if bool(keep.all()) else torch.where(keep[:, None, None], output, hidden)
            if index == early_layer:
                early = hidden
        final = model.norm(hidden)
        return {
            "final": self._loss(final, labels),
            "early": self._loss(model.norm(early), labels),
            "mtp": self._loss(self.mtp(final, embeddings[:, 1:], rotary), later_labels),
        }


def total_loss(
    losses: dict[str, torch.Tensor], step: int, recipe: TargetRecipe, num_layers: int
) -> torch.Tensor:
    """LayerSkip's normalised sum plus the weighted MTP loss (weight 0.3, then 0.1 for the last third)."""
    early, final = exit_weights(rotating_exit(step, num_layers), num_layers, recipe.exit_scale)
    mtp = recipe.mtp_weight if step < 2 * recipe.steps / 3 else recipe.mtp_weight_end
    return final * losses["final"] + early * losses["early"] + mtp * losses["mtp"]


def _batch(short: PackedBatches, long: PackedBatches, step: int, recipe: TargetRecipe) -> torch.Tensor:
    since_long = step - recipe.long_from
    if since_long >= 0 and since_long % 2 == 0:
        return long.batch(since_long // 2)
    return short.batch(step)


def train_step(
    training: TargetTraining, run: TrainingRun, tokens: torch.Tensor, step: int
) -> dict[str, float]:
    """One optimizer step; returns the three losses in nats."""
    recipe = training.recipe
    num_layers = training.target.config.num_hidden_layers
    rates = layer_dropout_rates(num_layers, recipe.layer_dropout, step / max(1, recipe.steps - 1))
    kept = draw_kept_rows(rates, len(tokens), run.generator)
    with torch.autocast("cpu", torch.bfloat16):
        losses = training.losses(tokens, kept, rotating_exit(step, num_layers))
    run.optimize(total_loss(losses, step, recipe, num_layers), step)
    return {name: loss.item() for name, loss in losses.items()}


def train_target(
    recipe: TargetRecipe, config: LlamaConfig, documents: list[np.ndarray], options: RunOptions
) -> tuple[TargetTraining, float]:
    """Train, or continue; returns the modules and the seconds in all."""
    torch.manual_seed(recipe.seed)
    training = TargetTraining(config, recipe)
    run = TrainingRun("target", recipe, {"target": training.target, "mtp": training.mtp}, options)
    if options.compiled:
        training.compile_blocks()
    short, long = (
        PackedBatches(
            documents=documents,
            separator=SEPARATOR_ID,
            row_tokens=length + 2,
            batch_rows=max(1, recipe.batch_tokens // length),
            seed=recipe.seed,
        )
        for length in (recipe.short_length, recipe.long_length)
    )
    run.run(lambda step: train_step(training, run, _batch(short, long, step, recipe), step))
    return training, run.elapsed_s
