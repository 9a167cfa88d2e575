"""What every recipe of ``drafthouse train`` begins with: target, rows of tokens, and a run to go on with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from specdec.core.errors import ConfigError, ResourceError
from specdec.model.checkpoint import Checkpoint, open_checkpoint, outline_of, revision_of
from specdec.model.loader import load_tokenizer
from training.checkpointing import replace_file
from training.drafters.capture import Capture, KeptStates
from training.drafters.options import TrainOptions
from training.drafters.recipe import DrafterRecipe
from training.drafters.rows import Rows
from training.drafters.texts import read_documents, split
from training.generation import sample
from training.optimization import Pace
from training.progress import console
from training.run import RunOptions, TrainingRun

_AUTO_MODEL: Any = AutoModelForCausalLM
_SAMPLED_AT_ONCE = 32
_PROMPT_LENGTH = 64
_RUN_FILE = "run.json"
_END_BYTES = 1 << 20
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
    separator: int
    rows: Rows
    held_out: list[np.ndarray]

    @classmethod
    def lay(cls, recipe: DrafterRecipe, options: TrainOptions, *, trains_target: bool = False) -> Groundwork:
        """Load the target (in float32 where its own weights are to move) and cut the data into rows.

        Raises:
            ConfigError: an option or a file of data is wrong.
            CheckpointError: the target cannot be read.
        """
        checkpoint = open_checkpoint(options.target)
        _require_free(options)
        torch.manual_seed(recipe.seed)
        device = _device(options)
        # On a CPU without units for it, a step in bfloat16 takes more than twice as long.
        is_mixed = options.dtype == "bfloat16" or (options.dtype == "auto" and device == "cuda")
        dtype = torch.bfloat16 if is_mixed and not trains_target else torch.float32
        model = load_frozen(options.target, dtype, device)
        tokenizer = load_tokenizer(options.target)
        train, held_out = split(read_documents(options.data, tokenizer))
        separator = tokenizer.eos_token_id if isinstance(tokenizer.eos_token_id, int) else 0
        rows = Rows.cut(
            train,
            separator=separator,
            length=recipe.row_length,
            batch_rows=recipe.batch_rows,
            seed=recipe.seed,
        )
        fingerprint = _fingerprint(checkpoint)
        if options.samples:
            rows = Rows(
                tokens=_sampled(model, rows, recipe, options, fingerprint),
                batch_rows=recipe.batch_rows,
                seed=recipe.seed,
            )
        return cls(
            recipe=recipe,
            options=options,
            model=model,
            outline=outline_of(checkpoint),
            fingerprint=fingerprint,
            is_mixed=is_mixed,
            tokenizer=tokenizer,
            separator=separator,
            rows=rows,
            held_out=held_out,
        )

    def batch(self, step: int, part: int) -> torch.Tensor:
        """int64 [batch_rows, T], on the target's device: what forward ``part`` of ``step`` reads."""
        tokens = self.rows.tokens[self.rows.indices(step * self.recipe.accumulate + part)]
        return tokens.to(self.model.device)

    def beginnings(self) -> torch.Tensor:
        """int64 [<= eval_texts, P]: beginnings of held-out documents, all of one length."""
        num_texts = self.options.eval_texts
        whole = torch.cat([torch.tensor([self.separator, *document.tolist()]) for document in self.held_out])
        length = min(_PROMPT_LENGTH, max(2, len(whole) // num_texts))
        count = max(1, min(num_texts, len(whole) // length))
        stride = len(whole) // count
        return torch.stack([whole[i * stride : i * stride + length] for i in range(count)])

    def begin_run(
        self,
        modules: dict[str, nn.Module],
        *,
        vocabulary_sizes: frozenset[int],
        paces: Mapping[str, Pace] | None = None,
    ) -> TrainingRun:
        """The run that WORK holds, or a new one.

        Raises:
            ConfigError: WORK holds a run with other settings.
        """
        recipe, options = self.recipe, self.options
        described = {**asdict(recipe), "target": self.outline, "rows": _digest(self.rows.tokens)}
        described["target_weights"] = self.fingerprint
        described["start_from"] = None if options.start_from is None else str(options.start_from)
        _require_same_run(options.work, described)
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
            paces=paces,
        )

    def kept_states(self, capture: Capture) -> KeptStates | None:
        """What the target makes of the rows, where that is kept on disk."""
        options = self.options
        if not options.keeps_hidden and options.hidden_folder is None:
            return None
        folder = options.hidden_folder or options.work / "hidden"
        return KeptStates(folder, capture, self.rows.tokens, self.fingerprint)

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
        with file.open("rb") as stream:
            digest.update(stream.read(_END_BYTES))
            stream.seek(max(0, file.stat().st_size - _END_BYTES))
            digest.update(stream.read(_END_BYTES))
    return digest.hexdigest()[:32]


def load_frozen(folder: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model of a folder, in evaluation mode and without gradients."""
    model: PreTrainedModel = _AUTO_MODEL.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False
    )
    torch.nn.Module.to(model, device)
    return model.eval().requires_grad_(requires_grad=False)


def _device(options: TrainOptions) -> str:
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise ResourceError("--device cuda: no GPU is there")
    return "cuda" if options.device == "cuda" or (options.device == "auto" and has_gpu) else "cpu"


def _require_free(options: TrainOptions) -> None:
    """What lies in OUT may be of the run that WORK holds; nothing else is written over."""
    out = options.out
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file: give a folder")
    is_of_this_run = (options.work / _RUN_FILE).exists()
    if out.is_dir() and any(out.iterdir()) and not is_of_this_run:
        raise ConfigError(
            f"--out {out} holds files, and {options.work} no run that they could be of: give another --out, "
            "or remove them"
        )


def _require_same_run(work: Path, described: dict[str, Any]) -> None:
    """Note what is trained in ``work``; a checkpoint of something else there is not gone on from."""
    file = work / _RUN_FILE
    described = json.loads(json.dumps(described))
    if not file.exists():
        text = json.dumps(described, indent=2) + "\n"
        replace_file(file, lambda temporary: temporary.write_text(text))
        return
    before: dict[str, Any] = json.loads(file.read_text())
    for name, value in described.items():
        # What is not there was no setting yet when the run began.
        if before.get(name, value) != value:
            raise ConfigError(
                f"{work} holds a run with {name} {before[name]!r}, not {value!r}: give another --work, "
                "or remove the folder to start anew"
            )


def _digest(rows: torch.Tensor) -> str:
    return hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:16]


def _sampled(
    model: PreTrainedModel, rows: Rows, recipe: DrafterRecipe, options: TrainOptions, fingerprint: str
) -> torch.Tensor:
    """int64 [samples, T]: beginnings of rows that the target goes on with; made once, in parts."""
    prompt_length = min(_PROMPT_LENGTH, recipe.row_length // 2)
    if options.samples < recipe.batch_rows:
        raise ConfigError(f"--samples must be at least --batch-rows ({recipe.batch_rows}), or 0")
    settings = (options.samples, recipe.row_length, recipe.seed, options.sample_temperature)
    origin = hashlib.sha256(f"{fingerprint} {_digest(rows.tokens)}".encode()).hexdigest()[:16]
    path = options.work / f"samples-{'-'.join(map(str, settings))}-{origin}.pt"
    written = torch.empty(0, recipe.row_length, dtype=torch.int64)
    if path.exists():
        written = torch.load(path, weights_only=True)  # noqa: TID251 - our own file
    starts = range(len(written), options.samples, _SAMPLED_AT_ONCE)
    for start in track(starts, "sampling from the target", console=console, disable=not starts):
        chosen = [
            index % len(rows.tokens) for index in range(start, min(options.samples, start + _SAMPLED_AT_ONCE))
        ]
        prompts = rows.tokens[chosen, :prompt_length]
        continuation = sample(
            model,  # type: ignore[arg-type]
            prompts.tolist(),
            num_tokens=recipe.row_length - prompt_length,
            temperatures=torch.full((len(prompts),), options.sample_temperature),
            seed=recipe.seed * 1000 + start,
        )
        written = torch.cat([written, torch.cat([prompts, continuation], dim=1)])
        replace_file(path, partial(torch.save, written))
    return written
