"""The draft's recipe: generalised knowledge distillation (GKD, Agarwal et al. 2024) from the target.

Three kinds of rows, all scored against the target's full distribution: corpus text (cheap, most of the
tokens), the target's own samples (generated once) and the draft's own samples (generated afresh every few
steps). Rows mix the temperatures at which the pair will be used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from training import blocked_attention
from training.architecture import demo_llama
from training.checkpointing import replace_file
from training.divergence import DivergenceName, divergence
from training.generation import sample
from training.packing import PackedBatches
from training.progress import console
from training.run import Recipe, RunOptions, TrainingRun
from training.tokenizer import SEPARATOR_ID

RowKind = Literal["corpus", "target", "draft", "long"]
SAMPLE_TEMPERATURES = (0.0, 0.7, 1.0)
"""Of generated rows, in equal shares."""
LOSS_TEMPERATURES = (1.0, 0.7, 0.4)
"""At which rows compare p with q (0.4 stands for greedy decoding, whose own gradient is zero)."""
_SAMPLING_ROWS = 128
REFRESH_STEPS = 24
"""Steps between fresh samples of the draft, which 8 of each 24 steps use. Checkpoints fall between them."""


@dataclass(frozen=True, kw_only=True)
class DraftRecipe(Recipe):
    """Everything that decides the draft's weights, given the target. Lengths are those of corpus rows."""

    steps: int = 1200
    long_share: float = 0.1
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
    seed: int = 2

    @property
    def generated_from(self) -> int:
        """First step that may use generated rows."""
        return self.steps - round(self.generated_share * self.steps)

    @property
    def generated_length(self) -> int:
        """Tokens of a generated row."""
        return self.prompt_length + self.sample_length


def draft_config() -> LlamaConfig:
    """The demo draft's architecture."""
    return demo_llama(hidden_size=128, num_layers=3, num_heads=2, num_kv_heads=1, intermediate_size=384)


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
            _save(path, self._generate(self.target, self.recipe.target_pool_rows, index=0))
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


def _save(path: Path, rows: torch.Tensor) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # to a name numpy would add its suffix
            np.save(file, rows.numpy().astype(np.uint16))

    replace_file(path, write)


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
    options: RunOptions,
) -> tuple[LlamaForCausalLM, float]:
    """Distil, or continue; returns the draft and the seconds in all."""
    torch.manual_seed(recipe.seed)
    training = DraftTraining(recipe, target, config, documents)
    run = TrainingRun("draft", recipe, {"draft": training.draft}, options)
    console.print("sampling from the target")
    training.fill_target_pool(options.work_folder / "target_samples.npy")
    if options.compiled:
        training.compile_blocks()

    def step(number: int) -> dict[str, float]:
        loss = training.loss(training.rows(number), number)
        run.optimize(loss, number)
        return {row_kind(number, recipe): loss.item()}

    # Between refreshes the draft's samples are of weights that no checkpoint has.
    run.run(step, may_pause=lambda num_done: num_done % REFRESH_STEPS == 0)
    return training.draft, run.elapsed_s
