"""What every recipe of ``drafthouse train`` begins with: target, rows of tokens, and a run to go on with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.core.errors import CheckpointError, ConfigError, ResourceError
from specdec.drafters.base import TargetParts
from specdec.model.checkpoint import Checkpoint, open_checkpoint, outline_of, revision_of
from specdec.model.facts import eos_token_ids_of
from specdec.model.rotary import longest_sequence
from specdec.model.tokenizer import load_tokenizer
from training.checkpointing import replace_file
from training.drafters.capture import Capture, KeptStates
from training.drafters.folders import described_run, ends_of, note_run, require_free, require_same_run
from training.drafters.options import TrainOptions
from training.drafters.recipe import DrafterRecipe
from training.drafters.rows import Rows
from training.drafters.texts import leading_ids, read_documents, split
from training.generation import write_rows
from training.optimization import ModuleRates
from training.progress import console
from training.run import RunOptions, TrainingRun
from training.whole_models import load_whole_model

_SAMPLED_AT_ONCE = 32
_PROMPT_LENGTH = 64
EVALUATION_FILE = "acceptance.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Groundwork:
    """Target and data of one recipe."""

    recipe: DrafterRecipe
    options: TrainOptions
    model: PreTrainedModel
    """The target; without gradients."""
    outline: str
    """Tells targets of different shapes apart (`model.checkpoint.outline_of`)."""
    fingerprint: str
    """Tells targets apart whose weights differ in anything."""
    is_mixed: bool
    """Whether matrix products are in bfloat16."""
    tokenizer: PreTrainedTokenizerBase
    lead: tuple[int, ...]
    """What the tokenizer begins every text with: so do rows and excerpts."""
    separator: int
    ends: tuple[int, ...]
    """Token ids with which the target ends a text."""
    rows: Rows
    held_out: list[np.ndarray]

    @classmethod
    def lay(
        cls,
        recipe: DrafterRecipe,
        options: TrainOptions,
        *,
        trains_target: bool = False,
        check: Callable[[TargetParts], None] | None = None,
    ) -> Groundwork:
        """Load the target (in float32 where its own weights are to move) and cut the data into rows.

        ``check`` refuses targets that the recipe is not for: it is called before the data are read, and
        before the target writes samples, which may take hours.

        Raises:
            ConfigError: an option or a file of data is wrong.
            CheckpointError: the target cannot be read.
        """
        checkpoint = open_checkpoint(options.target)
        require_free(options)
        torch.manual_seed(recipe.seed)
        device = _device(options)
        # On a CPU without units for it, a step in bfloat16 takes more than twice as long.
        is_mixed = options.dtype == "bfloat16" or (options.dtype == "auto" and device == "cuda")
        dtype = torch.bfloat16 if is_mixed and not trains_target else torch.float32
        fingerprint = _fingerprint(checkpoint)
        # What is refused is refused before anything that takes long.
        outline = outline_of(checkpoint)
        require_same_run(
            options.work, described_run(recipe, options, outline, fingerprint, is_mixed=is_mixed)
        )
        model = load_frozen(options.target, dtype, device)
        _require_positions(model, recipe)
        if check is not None:
            check(TargetParts.of(model))
        tokenizer = load_tokenizer(options.target)
        lead, separator = leading_ids(tokenizer), _separator(tokenizer, model)
        ends = eos_token_ids_of(checkpoint, model.config)
        documents = read_documents(options.data, tokenizer, leaving_out=(options.out, options.work))
        _require_known(documents, (separator, *lead), model, options.target)
        train, held_out = split(documents)
        rows = Rows.cut(
            train,
            separator=separator,
            length=recipe.row_length,
            batch_rows=recipe.batch_rows,
            seed=recipe.seed,
            lead=lead,
        )
        if options.samples:
            rows = Rows(
                tokens=_sampled(model, rows, recipe, options, fingerprint, len(lead), ends),
                batch_rows=recipe.batch_rows,
                seed=recipe.seed,
            )
        return cls(
            recipe=recipe,
            options=options,
            model=model,
            outline=outline,
            fingerprint=fingerprint,
            is_mixed=is_mixed,
            tokenizer=tokenizer,
            lead=lead,
            separator=separator,
            ends=ends,
            rows=rows,
            held_out=held_out,
        )

    def batch(self, step: int, part: int) -> torch.Tensor:
        """int64 [batch_rows, T], on the target's device: what forward ``part`` of ``step`` reads."""
        tokens = self.rows.tokens[self.rows.indices(step * self.recipe.accumulate + part)]
        return tokens.to(self.model.device)

    def excerpts(self) -> torch.Tensor:
        """int64 [<= eval_texts, P]: excerpts, at equal strides, of all held-out documents joined."""
        num_texts = self.options.eval_texts
        whole = torch.cat([torch.tensor([self.separator, *document.tolist()]) for document in self.held_out])
        longest = min(_PROMPT_LENGTH, (_num_positions(self.model) or 2 * _PROMPT_LENGTH) // 2)
        lead = torch.tensor(self.lead, dtype=torch.int64)
        length = min(longest - len(lead), max(2, len(whole) // num_texts))
        count = max(1, min(num_texts, len(whole) // length))
        stride = len(whole) // count
        return torch.stack([torch.cat([lead, whole[i * stride : i * stride + length]]) for i in range(count)])

    @property
    def num_evaluated(self) -> int:
        """Tokens that the target writes behind each of `excerpts`: as many as its positions allow."""
        wanted, limit = self.options.eval_tokens, _num_positions(self.model)
        return wanted if limit is None else min(wanted, limit - min(_PROMPT_LENGTH, limit // 2))

    def begin_run(
        self,
        modules: dict[str, nn.Module],
        *,
        vocabulary_sizes: frozenset[int],
        rates: Mapping[str, ModuleRates] | None = None,
    ) -> TrainingRun:
        """The run that WORK holds, or a new one.

        Raises:
            ConfigError: WORK holds a run with other settings.
        """
        recipe, options = self.recipe, self.options
        described = described_run(recipe, options, self.outline, self.fingerprint, is_mixed=self.is_mixed)
        described["rows"] = _digest(self.rows.tokens)
        require_same_run(options.work, described)
        note_run(options, described)
        return TrainingRun(
            recipe.method,
            recipe,
            modules,
            RunOptions(
                work_folder=options.work,
                compiled=False,
                stop_after_step=options.stop_after_step,
                checkpoint_every_s=options.checkpoint_every_s,
            ),
            vocabulary_sizes=vocabulary_sizes,
            rates=rates,
        )

    def kept_states(self, capture: Capture) -> KeptStates | None:
        """What the target makes of the rows, where that is kept on disk."""
        options = self.options
        if not options.rounds_states:
            return None
        folder = options.hidden_folder or options.work / "hidden"
        # In bfloat16 a target makes something else of them.
        made_by = f"{self.fingerprint} {self.model.dtype}"
        return KeptStates(folder, capture, self.rows.tokens, made_by)

    def report(self, run: TrainingRun, num_parameters: int, acceptance: dict[str, Any]) -> dict[str, Any]:
        """What was done and measured; written to OUT, too."""
        recipe = self.recipe
        report: dict[str, Any] = {
            "recipe": asdict(recipe),
            "target": str(self.options.target),
            "elapsed_s": round(run.elapsed_s, 1),
            "trained_tokens": recipe.steps * recipe.accumulate * recipe.batch_rows * recipe.row_length,
            "parameters": num_parameters,
        }
        if acceptance:
            report["acceptance"] = acceptance
        (self.options.out / EVALUATION_FILE).write_text(json.dumps(report, indent=2) + "\n")
        return report


def _fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of a target, with both ends of each weight file: of large ones the revision reads no weights."""
    digest = hashlib.sha256(revision_of(checkpoint).encode())
    for file in checkpoint.weight_files:
        digest.update(ends_of(file))
    return digest.hexdigest()[:32]


def load_frozen(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model of a folder, in evaluation mode and without gradients.

    Raises:
        CheckpointError: transformers does not read it, or it lacks weights of the model that it names.
    """
    loaded = load_whole_model(folder, dtype)
    torch.nn.Module.to(loaded, device)
    return loaded.eval().requires_grad_(requires_grad=False)


def _num_positions(model: PreTrainedModel) -> int | None:
    """How many tokens a text of the target's may have; None: it does not say."""
    return longest_sequence(model.config)


def _require_positions(model: PreTrainedModel, recipe: DrafterRecipe) -> None:
    limit = _num_positions(model)
    if limit is not None and recipe.row_length > limit:
        raise ConfigError(
            f"--row-length {recipe.row_length}: the target is made for texts of {limit} tokens at most"
        )


def _separator(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> int:
    """The id that ends texts, or what comes next to that."""
    config = model.config.get_text_config()
    ends = getattr(config, "eos_token_id", None)
    stated = (tokenizer.eos_token_id, ends[0] if isinstance(ends, list) and ends else ends)
    chosen = (one for one in (*stated, tokenizer.bos_token_id) if isinstance(one, int))
    return next(chosen, 0)


def _require_known(
    documents: list[np.ndarray], others: Sequence[int], model: PreTrainedModel, target: Path
) -> None:
    """Tokenizers of fine-tuned models have ids at times that their models do not."""
    most = max(*others, *(int(document.max()) for document in documents))
    num_known = TargetParts.of(model).vocab_size
    if most >= num_known:
        raise CheckpointError(
            f"the tokenizer of {target} makes token id {most} of --data, and the model knows {num_known} "
            "ids: they do not belong together, or the model was not resized when tokens were added"
        )


def _device(options: TrainOptions) -> str:
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise ResourceError("--device cuda: no GPU is there")
    return "cuda" if options.device == "cuda" or (options.device == "auto" and has_gpu) else "cpu"


def _digest(rows: torch.Tensor) -> str:
    return hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:16]


def _sampled(
    model: PreTrainedModel,
    rows: Rows,
    recipe: DrafterRecipe,
    options: TrainOptions,
    fingerprint: str,
    num_leading: int,
    ends: Sequence[int],
) -> torch.Tensor:
    """int64 [samples, T]: beginnings of rows that the target goes on with; made once.

    Where it ends a text, it goes on with the beginning of another row, less the ``num_leading`` tokens that
    begin each. A part is kept in a file of its own as soon as it is made; all of them become one file.
    """
    prompt_length = min(_PROMPT_LENGTH, recipe.row_length // 2)
    if options.samples < recipe.batch_rows:
        raise ConfigError(f"--samples must be at least --batch-rows ({recipe.batch_rows}), or 0")
    settings = (options.samples, recipe.row_length, recipe.seed, options.sample_temperature)
    origin = hashlib.sha256(f"{fingerprint} {_digest(rows.tokens)} {list(ends)}".encode()).hexdigest()[:16]
    path = options.work / f"samples-{'-'.join(map(str, settings))}-{origin}.pt"
    parts = _read_parts(path)
    starts = range(sum(map(len, parts)), options.samples, _SAMPLED_AT_ONCE)
    for start in track(starts, "sampling from the target", console=console, disable=not starts):
        end = min(options.samples, start + _SAMPLED_AT_ONCE)

        def beginnings(number: int, start: int = start, end: int = end) -> torch.Tensor:
            places = range(start + number * options.samples, end + number * options.samples)
            chosen = [place % len(rows.tokens) for place in places]
            return rows.tokens[chosen, num_leading if number else 0 : prompt_length]

        made = write_rows(
            model,  # type: ignore[arg-type]
            beginnings,
            length=recipe.row_length,
            temperatures=torch.full((end - start,), options.sample_temperature),
            seed=recipe.seed * 1000 + start,
            ends=ends,
        )
        parts.append(made)
        replace_file(_part(path, start), partial(torch.save, made))
    written = torch.cat(parts)
    if len(parts) > 1 or not path.exists():
        replace_file(path, partial(torch.save, written))
    for part in path.parent.glob(_part(path, "*").name):
        part.unlink()
    return written


def _part(path: Path, start: int | str) -> Path:
    """The file of the rows from ``start`` on, as long as there is none of all."""
    return path.with_name(f"{path.stem}-from-{start}{path.suffix}")


def _read_parts(path: Path) -> list[torch.Tensor]:
    """Rows that are there, in order: those of the file (all, or the first ones, as earlier versions left it),
    then those of its parts."""
    parts = [_read_rows(path)] if path.exists() else []
    while (part := _part(path, sum(map(len, parts)))).exists():
        parts.append(_read_rows(part))
    return parts


def _read_rows(file: Path) -> torch.Tensor:
    rows: torch.Tensor = torch.load(file, weights_only=True)  # noqa: TID251 - our own file
    return rows
