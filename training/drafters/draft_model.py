"""Draft models by generalised knowledge distillation (GKD, Agarwal et al. 2024) from the target.

Rows are texts, or what the target writes (`--samples`), or, in a share of the steps, continuations that the
draft model writes itself: there it learns the positions that it will meet. All are scored against the
target's full distribution, at the temperatures at which the pair will be used.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.core.errors import ConfigError
from specdec.drafters.base import FINAL_NORM, TargetParts
from specdec.model.checkpoint import open_checkpoint
from specdec.model.layer_map import CONFIG_KEY
from specdec.model.parallel.plan import UnsupportedParallelism
from specdec.model.parallel.stages import layer_stack
from specdec.model.tokenizer import check_same_tokenizer
from training.divergence import divergence
from training.draft_distillation import LOSS_TEMPERATURES, SAMPLE_TEMPERATURES, cycled
from training.drafters.acceptance import evaluate_language_model
from training.drafters.capture import Capture, KeptStates
from training.drafters.groundwork import Groundwork, load_frozen
from training.drafters.options import TrainOptions
from training.drafters.recipe import DrafterRecipe
from training.drafters.stored import save_language_model
from training.generation import write_rows
from training.progress import console

logger = logging.getLogger(__name__)

_AUTO_MODEL: Any = AutoModelForCausalLM
REFRESH_STEPS = 20
"""Steps between fresh samples of the draft model. Checkpoints fall between: older weights are not kept."""


def is_on_policy(step: int, share: float) -> bool:
    """Whether a step reads what the draft model writes: ``share`` of all steps, evenly."""
    return int((step + 1) * share) > int(step * share)


@dataclass(frozen=True, slots=True)
class Vocabularies:
    """Token ids of a target and a draft model with one tokenizer, whose LM heads may be padded differently.

    Ids of the padding mean nothing: whatever compares the two looks at the ``common`` ones.
    """

    target: int
    draft: int

    @classmethod
    def of(cls, target: PreTrainedModel, draft: PreTrainedModel) -> Vocabularies:
        """Take the numbers of logits that both compute."""
        return cls(TargetParts.of(target).vocab_size, TargetParts.of(draft).vocab_size)

    @property
    def common(self) -> int:
        """Ids below this are known to both."""
        return min(self.target, self.draft)

    def readable(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens that the draft model can read: the target may have written one of its padding."""
        return tokens.clamp(max=self.draft - 1)

    def as_target(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [..., draft] as [..., target]; -inf where the draft model has none."""
        known = logits[..., : self.common]
        return torch.nn.functional.pad(known, (0, self.target - self.common), value=float("-inf"))


class DraftModelTraining:
    """A draft model, and what it learns from."""

    def __init__(self, ground: Groundwork, draft: PreTrainedModel, kept: KeptStates | None) -> None:
        self.draft = draft
        self.vocabularies = Vocabularies.of(ground.model, draft)
        self._ground = ground
        self._kept = kept
        self._capture = Capture(ground.model, (FINAL_NORM,))
        self._written: dict[tuple[int, int], torch.Tensor] = {}
        """What the draft model has written for the steps and parts up to the next refresh."""

    def loss(self, step: int, part: int) -> tuple[torch.Tensor, dict[str, float]]:
        """What to go down, and what to log."""
        recipe, ground = self._ground.recipe, self._ground
        on_policy = is_on_policy(step, recipe.on_policy)
        if on_policy:
            tokens = self._own_rows(step, part)
            states = self._capture.states(tokens)
        else:
            indices = ground.rows.indices(step * recipe.accumulate + part)
            tokens = ground.batch(step, part)
            states = self._capture.states(tokens) if self._kept is None else self._kept.states(indices)
        wanted = self._capture.logits(states)
        heat = cycled(LOSS_TEMPERATURES, len(tokens), start=step).to(tokens.device)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=ground.is_mixed):
            logits = self.draft(self.vocabularies.readable(tokens), use_cache=False).logits
        common = self.vocabularies.common
        rows = [(one[..., :common].float() / heat[:, None, None]).flatten(0, 1) for one in (wanted, logits)]
        loss = divergence(recipe.divergence, rows[0], rows[1]).mean()
        return loss, {"draft_rows" if on_policy else "rows": loss.item()}

    def _own_rows(self, step: int, part: int) -> torch.Tensor:
        """int64 [batch_rows, T]: beginnings of rows that the draft model, of the refresh, goes on with."""
        if (step, part) not in self._written:
            self._written = self._write(step - step % REFRESH_STEPS)
        return self._written[step, part].to(self._ground.model.device)

    def _write(self, first: int) -> dict[tuple[int, int], torch.Tensor]:
        ground, recipe = self._ground, self._ground.recipe
        places = [
            (step, part)
            for step in range(first, first + REFRESH_STEPS)
            if is_on_policy(step, recipe.on_policy)
            for part in range(recipe.accumulate)
        ]
        length = max(1, recipe.row_length // 4)
        written: dict[tuple[int, int], torch.Tensor] = {}
        for step, part in places:
            batch = self.vocabularies.readable(ground.batch(step, part).cpu())
            written[step, part] = write_rows(
                self.draft,  # type: ignore[arg-type]
                partial(_beginnings, batch, length, len(ground.lead)),
                length=recipe.row_length,
                temperatures=cycled(SAMPLE_TEMPERATURES, len(batch), start=step),
                seed=recipe.seed * 1000 + step * recipe.accumulate + part,
                ends=ground.ends,
                num_ids=self.vocabularies.common,
            )
        return written


def _beginnings(batch: torch.Tensor, length: int, num_leading: int, number: int) -> torch.Tensor:
    """int64 [B, <= length]: of rows [B, T]; behind a text that has ended it is another part of its row."""
    rows = batch[:, num_leading if number else 0 :]
    return rows.roll(-number * length, dims=1)[:, :length]


def first_layers(target: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A model of the target's embeddings, norm, head and first layers: what a draft model begins as.

    Raises:
        ConfigError: nothing would be left out, or the target's layers are not in one list, or its
            configuration does not go with fewer.
    """
    try:
        name, stack = layer_stack(target)
    except UnsupportedParallelism as error:
        raise _not_cut(error) from error
    if num_layers >= len(stack):
        raise ConfigError(f"--num-layers {num_layers}: the target has {len(stack)}; a draft model has fewer")
    config: Any = copy.deepcopy(target.config)
    _keep_first(config.get_text_config(), num_layers)
    _keep_positions(config, num_layers)
    try:
        config.validate()  # else it is told when the trained model is written
    except StrictDataclassError as error:
        raise _not_cut(error.__cause__ or error) from error
    draft: PreTrainedModel = _AUTO_MODEL.from_config(config)
    own = {
        weight: tensor
        for weight, tensor in target.state_dict().items()
        if not weight.startswith(f"{name}.") or int(weight[len(name) + 1 :].split(".")[0]) < num_layers
    }
    draft.load_state_dict(own)
    return draft.float()


def _keep_first(config: Any, num_layers: int) -> None:
    """Leave a configuration its first layers: their number, and of lists with an entry for each the first."""
    by_layer = {
        name: value[:num_layers]
        for name, value in vars(config).items()
        if isinstance(value, list | tuple)
        and ("layer" in name or name.endswith("_types"))
        and len(value) == config.num_hidden_layers
    }
    config.num_hidden_layers = num_layers
    for name, value in by_layer.items():
        setattr(config, name, value)


def _keep_positions(config: Any, num_layers: int) -> None:
    """Leave the positions that an inflated target has for its original layers where they still are."""
    positions = getattr(config, CONFIG_KEY, None)
    if positions is None:
        return
    kept = [position for position in positions if position < num_layers]
    if kept:
        setattr(config, CONFIG_KEY, kept)
    else:
        delattr(config, CONFIG_KEY)


def _not_cut(cause: BaseException) -> ConfigError:
    return ConfigError(
        f"draft_model: no model of fewer layers can be cut from this target ({cause}); give --start-from"
    )


def train_draft_model(recipe: DrafterRecipe, options: TrainOptions) -> dict[str, Any]:
    """Distil, or go on; OUT is an ordinary model folder with the target's tokenizer.

    Raises:
        ConfigError: an option, a file of data, or the recipe for this target is wrong.
        CheckpointError: target, or the model to start from, cannot be read, or their tokenizers differ.
    """
    if options.start_from is not None:
        if recipe.num_layers != DrafterRecipe.num_layers:
            raise ConfigError("--num-layers is of what is cut from the target: leave it out, or --start-from")
        open_checkpoint(options.start_from)
        for difference in check_same_tokenizer(options.target, options.start_from):
            logger.warning("--start-from: %s", difference)
    ground = Groundwork.lay(recipe, options)
    draft = _beginning(ground, options.start_from)
    run = ground.begin_run({"draft": draft}, vocabulary_sizes=frozenset({TargetParts.of(draft).vocab_size}))
    training = DraftModelTraining(ground, draft, ground.kept_states(Capture(ground.model, (FINAL_NORM,))))
    run.run(
        lambda number: run.accumulate(number, recipe.accumulate, training.loss),
        may_pause=lambda num_done: recipe.on_policy == 0.0 or num_done % REFRESH_STEPS == 0,
    )
    begun_as = options.start_from or options.target
    save_language_model(draft, ground.tokenizer, options.out, getattr(torch, options.stored_dtype), begun_as)
    acceptance: dict[str, Any] = {}
    if options.eval_texts:
        console.print("measuring acceptance")
        acceptance = evaluate_language_model(
            ground.model,
            _without_gradients(draft, training.vocabularies),
            ground.excerpts(),
            num_generated=ground.num_evaluated,
            num_drafted=recipe.depth,
            ends=ground.ends,
            seed=recipe.seed,
        )
    return ground.report(run, sum(parameter.numel() for parameter in draft.parameters()), acceptance)


def _beginning(ground: Groundwork, start_from: Path | None) -> PreTrainedModel:
    device = str(ground.model.device)
    if start_from is None:
        draft = first_layers(ground.model, ground.recipe.num_layers)
        torch.nn.Module.to(draft, device)
    else:
        draft = load_frozen(start_from, torch.float32, device)
    sizes = Vocabularies.of(ground.model, draft)
    num_needed = min(sizes.target, 1 + max(ground.tokenizer.get_vocab().values()))
    if sizes.draft < num_needed:
        raise ConfigError(
            f"--start-from {start_from} computes {sizes.draft} logits, and the target {sizes.target}, of "
            f"which the tokenizer names {num_needed}: give a model whose LM head has a row for each of these"
        )
    return draft.eval().requires_grad_(requires_grad=True)


def _without_gradients(
    draft: PreTrainedModel, vocabularies: Vocabularies
) -> Callable[[torch.Tensor], torch.Tensor]:
    @torch.no_grad()
    def logits(text: torch.Tensor) -> torch.Tensor:
        return vocabularies.as_target(draft(vocabularies.readable(text), use_cache=False).logits)

    return logits
