"""The draft's recipe: generalised knowledge distillation (GKD, Agarwal et al. 2024) from the target.

Three kinds of rows, all scored against the target's full distribution: corpus text (cheap, most of the
tokens), the target's own samples (generated once) and the draft's own samples (generated afresh every few
steps). Rows mix the temperatures at which the pair will be used.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from training import blocked_attention
from training.checkpointing import load_checkpoint, save_checkpoint
from training.divergence import DivergenceName, divergence
from training.generation import sample
from training.optimization import learning_rate_factor, make_optimizers, set_learning_rates
from training.packing import PackedBatches
from training.progress import TrainingLog, console
from training.tokenizer import CONTEXT_LENGTH, PAD_ID, SEPARATOR_ID, VOCAB_SIZE

RowKind = Literal["corpus", "target", "draft", "long"]
SAMPLE_TEMPERATURES = (0.0, 0.7, 1.0)
"""Of generated rows, in equal shares."""
LOSS_TEMPERATURES = (1.0, 0.7, 0.4)
"""At which rows compare p with q (0.4 stands for greedy decoding, whose own gradient is zero)."""
_SAMPLING_ROWS = 128
REFRESH_STEPS = 24
"""Steps between fresh samples of the draft, which 8 of each 24 steps use. Checkpoints fall between them."""


@dataclass(frozen=True, kw_only=True)
class DraftRecipe:
    """Everything that decides the draft's weights, given the target."""

    steps: int = 1200
    batch_tokens: int = 8192
    short_length: int = 512
    """Row length of corpus rows, in tokens."""
    long_length: int = CONTEXT_LENGTH
    long_share: float = 0.1
    """Share of the steps at ``long_length``: every other step of the last 2 x this share."""
    generated_share: float = 0.5
    """Share of the steps, at the end, in which corpus rows alternate with generated ones."""
    prompt_length: int = 64
    sample_length: int = 192
    """Tokens generated after each prompt of a generated row."""
    target_pool_rows: int = 1536
    """Rows sampled from the target once."""
    early_divergence: DivergenceName = "forward_kl"
    """Until generated rows begin ..."""
    late_divergence: DivergenceName = "total_variation"
    """... and from there on, mixed half and half with the early one."""
    muon_lr: float = 4e-3
    adamw_lr: float = 6e-3
    weight_decay: float = 0.05
    warmup_steps: int = 40
    constant_share: float = 0.4
    clip_norm: float = 1.0
    seed: int = 2

    @property
    def generated_from(self) -> int:
        """First step that may use generated rows."""
        return self.steps - round(self.generated_share * self.steps)

    @property
    def long_from(self) -> int:
        """First step that may use long rows."""
        return self.steps - round(2 * self.long_share * self.steps)

    @property
    def generated_length(self) -> int:
        """Tokens of a generated row."""
        return self.prompt_length + self.sample_length


def draft_config() -> LlamaConfig:
    """The demo draft's architecture."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=384,
        max_position_embeddings=CONTEXT_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=SEPARATOR_ID,
        eos_token_id=SEPARATOR_ID,
        pad_token_id=PAD_ID,
        initializer_range=0.02,
    )


def row_kind(step: int, recipe: DraftRecipe) -> RowKind:
    """Which rows a step trains on: a pure function, so that a resumed run repeats none and skips none.

    Even steps are corpus rows, or long ones at the end; odd ones are generated, two of the draft's for each
    of the target's.
    """
    if step >= recipe.long_from and step % 2 == 0:
        return "long"
    if step < recipe.generated_from or step % 2 == 0:
        return "corpus"
    return "target" if step % 6 == 1 else "draft"


def cycled(choices: tuple[float, ...], count: int, start: int = 0) -> torch.Tensor:
    """float [count], cycling through ``choices`` from the ``start``-th."""
    return torch.tensor([choices[(start + row) % len(choices)] for row in range(count)])


def draft_sample_slot(step: int) -> int:
    """Which eighth of the refreshed samples a "draft" step uses (those are steps 3 and 5 of every six)."""
    return step % REFRESH_STEPS // 6 * 2 + (step % 6 == 5)


def distillation_loss(
    target_hidden: torch.Tensor,
    target_head: torch.Tensor,
    draft_hidden: torch.Tensor,
    draft_head: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    first: DivergenceName,
    second: DivergenceName,
) -> torch.Tensor:
    """Mean of two divergences over rows: normed hidden states [N, H], heads [V, H], ``temperatures`` [N]."""
    heat = temperatures.unsqueeze(1)
    target_logits = (target_hidden @ target_head.t()).float() / heat
    draft_logits = (draft_hidden @ draft_head.t()).float() / heat
    loss = divergence(first, target_logits, draft_logits)
    if second != first:
        loss = 0.5 * (loss + divergence(second, target_logits, draft_logits))
    return loss.mean()


class DraftTraining:
    """The pair and its sources of rows."""

    def __init__(
        self, recipe: DraftRecipe, target: LlamaForCausalLM, config: LlamaConfig, documents: list[np.ndarray]
    ) -> None:
        config._attn_implementation = blocked_attention.NAME
        self.recipe = recipe
        target.config._attn_implementation = blocked_attention.NAME
        self.target = target.bfloat16().eval().requires_grad_(requires_grad=False)
        self.draft = LlamaForCausalLM(config)
        self._loss = distillation_loss
        packed = partial(PackedBatches, documents=documents, separator=SEPARATOR_ID, seed=recipe.seed)
        self._short = packed(
            row_tokens=recipe.short_length, batch_rows=max(1, recipe.batch_tokens // recipe.short_length)
        )
        self._long = packed(
            row_tokens=recipe.long_length, batch_rows=max(1, recipe.batch_tokens // recipe.long_length)
        )
        self._rows_per_step = max(1, recipe.batch_tokens // recipe.generated_length)
        self._prompts = packed(row_tokens=recipe.prompt_length, batch_rows=_SAMPLING_ROWS)
        self._target_pool = self._drafted = torch.empty(0, recipe.generated_length, dtype=torch.int64)
        self._refresh: int | None = None
        self._sampler = LlamaForCausalLM(LlamaConfig.from_dict(config.to_dict())).bfloat16().eval()

    def compile_blocks(self) -> None:
        """Compile the decoder blocks of both models and the loss."""
        for block in (*self.target.model.layers, *self.draft.model.layers):
            block.compile(dynamic=False)
        self._loss = torch.compile(distillation_loss, dynamic=False)

    def fill_target_pool(self, path: Path) -> None:
        """Sample the target's rows (before ``compile_blocks``), or read them from ``path``."""
        if not path.exists():
            rows = self._generate(self.target, self.recipe.target_pool_rows, index=0)
            path.parent.mkdir(parents=True, exist_ok=True)
            np.save(path, rows.numpy().astype(np.uint16))
        self._target_pool = torch.from_numpy(np.load(path).astype(np.int64))

    def _generate(self, model: LlamaForCausalLM, rows: int, index: int) -> torch.Tensor:
        """int64 [>= rows, generated_length]: prompts from the ``index``-th on, and continuations."""
        batches = []
        for number in range(index, index + -(-rows // _SAMPLING_ROWS)):
            prompts = self._prompts.batch(number)
            continuation = sample(
                model,
                prompts.tolist(),
                num_tokens=self.recipe.sample_length,
                temperatures=cycled(SAMPLE_TEMPERATURES, len(prompts)),
                seed=self.recipe.seed * 1000 + number,
            )
            batches.append(torch.cat([prompts, continuation], dim=1))
        return torch.cat(batches)

    def _draft_pool(self, refresh: int) -> torch.Tensor:
        """The draft's own samples of this refresh, from its weights when first asked for."""
        if refresh != self._refresh:
            self._refresh = refresh
            self._sampler.load_state_dict(self.draft.state_dict())
            self._drafted = self._generate(self._sampler, 8 * self._rows_per_step, index=10_000 + 8 * refresh)
        return self._drafted

    def rows(self, step: int) -> torch.Tensor:
        """int64 [B, T]: what ``step`` trains on."""
        kind = row_kind(step, self.recipe)
        if kind == "long":
            return self._long.batch((step - self.recipe.long_from) // 2)
        if kind == "corpus":
            return self._short.batch(step)
        if kind == "target":
            pool, slot = self._target_pool, step // 6
        else:
            pool, slot = self._draft_pool(step // REFRESH_STEPS), draft_sample_slot(step)
        start = slot * self._rows_per_step % len(pool)
        return pool[start : start + self._rows_per_step]

    def loss(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        """Mean divergence over all positions of int64 [B, T]."""
        recipe = self.recipe
        late = step >= recipe.generated_from
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target_hidden = _hidden(self.target, tokens)
            draft_hidden = _hidden(self.draft, tokens)
        temperatures = cycled(LOSS_TEMPERATURES, len(tokens), start=step // 2)
        return self._loss(
            target_hidden.to(torch.bfloat16).flatten(0, 1),
            self.target.lm_head.weight,
            draft_hidden.to(torch.bfloat16).flatten(0, 1),
            self.draft.lm_head.weight.to(torch.bfloat16),
            temperatures.repeat_interleave(tokens.shape[1]),
            first=recipe.early_divergence,
            second=recipe.late_divergence if late else recipe.early_divergence,
        )


def _hidden(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """[B, T, H] after the final norm, calling the blocks directly (no cache, no mask)."""
    inner = model.model
    hidden = inner.embed_tokens(tokens)
    rotary = inner.rotary_emb(hidden, torch.arange(tokens.shape[1]).unsqueeze(0))
    for block in inner.layers:
        hidden = block(hidden, position_embeddings=rotary)
    return inner.norm(hidden)


def train_draft(
    recipe: DraftRecipe,
    target: LlamaForCausalLM,
    config: LlamaConfig,
    documents: list[np.ndarray],
    *,
    work_folder: Path,
    compiled: bool = True,
    checkpoint_every_s: float = 180.0,
    stop_after_step: int | None = None,
) -> tuple[LlamaForCausalLM, float]:
    """Distil, or continue from ``work_folder/checkpoint.pt``; returns the draft and the seconds in all."""
    torch.manual_seed(recipe.seed)
    training = DraftTraining(recipe, target, config, documents)
    draft = training.draft
    optimizers = make_optimizers(
        [draft], muon_lr=recipe.muon_lr, adamw_lr=recipe.adamw_lr, weight_decay=recipe.weight_decay
    )
    generator = torch.Generator().manual_seed(recipe.seed)
    checkpoint = work_folder / "checkpoint.pt"
    modules: dict[str, nn.Module] = {"draft": draft}
    first, before_s = load_checkpoint(checkpoint, modules=modules, optimizers=optimizers, generator=generator)
    started = saved = time.monotonic()
    console.print("sampling from the target")
    training.fill_target_pool(work_folder / "target_samples.npy")
    if compiled:
        training.compile_blocks()
    last = recipe.steps if stop_after_step is None else min(recipe.steps, stop_after_step)
    with TrainingLog("draft", work_folder / "log.jsonl", first=first, total=recipe.steps) as log:
        for step in range(first, last):
            loss = training.loss(training.rows(step), step)
            loss.backward()
            nn.utils.clip_grad_norm_(draft.parameters(), recipe.clip_norm)
            factor = learning_rate_factor(step, recipe.steps, recipe.warmup_steps, recipe.constant_share)
            set_learning_rates(optimizers, factor)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            log.record(step, {row_kind(step, recipe): loss.item()})
            now = time.monotonic()
            is_due = now - saved > checkpoint_every_s and (step + 1) % REFRESH_STEPS == 0
            if is_due or step + 1 == last:
                saved = now
                save_checkpoint(
                    checkpoint,
                    step=step + 1,
                    elapsed_s=before_s + now - started,
                    modules=modules,
                    optimizers=optimizers,
                    generator=generator,
                )
    return draft, before_s + time.monotonic() - started
