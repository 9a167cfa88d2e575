"""Trains a drafter for a target: data, hidden states, steps, checkpoints, evaluation, finished folder."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.core.errors import ConfigError, ResourceError
from specdec.drafters.base import Drafter, TargetParts
from specdec.drafters.checkpoints.registry import load_drafter
from specdec.model.checkpoint import open_checkpoint, outline_of
from specdec.model.loader import load_tokenizer
from training.drafters.acceptance import evaluate_acceptance
from training.drafters.capture import Capture, KeptStates
from training.drafters.methods import Training, make_training
from training.drafters.objectives import TargetRows
from training.drafters.recipe import CheckpointLayout, DrafterRecipe
from training.drafters.rows import Rows
from training.drafters.texts import read_documents, split
from training.generation import sample
from training.progress import console
from training.run import RunOptions, TrainingRun

_AUTO_MODEL: Any = AutoModelForCausalLM
_SAMPLED_AT_ONCE = 32
_PROMPT_LENGTH = 64
EVALUATION_FILE = "acceptance.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What is trained, on what, and where things go."""

    target: Path
    data: tuple[Path, ...]
    out: Path
    work: Path
    """Checkpoint, log, hidden states and samples: what the same command goes on from."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the target, and of matrix products (weights in training are float32); auto: bfloat16 on a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    samples: int = 0
    """Rows of the target's own writing to train on instead of the texts, which only begin them."""
    sample_temperature: float = 0.7
    start_from: Path | None = None
    """Folder of a drafter of the same kind and shapes for this target (mtp: the target's own), whose weights
    are trained further; None: new ones."""
    keeps_hidden: bool = False
    """Keep hidden states on disk, for later epochs and runs."""
    layout: CheckpointLayout = "published"
    stored_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the finished weights, which are rounded to it before their acceptance is measured."""
    eval_texts: int = 16
    """Held-out beginnings that acceptance is measured behind; 0: it is not."""
    eval_tokens: int = 96
    stop_after_step: int | None = None
    checkpoint_every_s: float = 180.0


def train_drafter(recipe: DrafterRecipe, options: TrainOptions) -> dict[str, Any]:
    """Train, or go on, and return the measured acceptance.

    Raises:
        ConfigError: an option, a file of data, or the recipe for this target is wrong.
        CheckpointError: the target cannot be read.
    """
    torch.manual_seed(recipe.seed)
    model = _load(options)
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
    if options.samples:
        rows = Rows(
            tokens=_sampled(model, rows, recipe, options),
            batch_rows=recipe.batch_rows,
            seed=recipe.seed,
        )
    counts = torch.bincount(rows.tokens.flatten())
    training = make_training(recipe, TargetParts.of(model), counts)
    if options.start_from is not None:
        _start_from(training.drafter, options.start_from)
    capture = Capture(model, training.drafter.hidden_layers)
    drafter = training.drafter.to(model.device)
    name = outline_of(open_checkpoint(options.target))
    described = {**asdict(recipe), "target": name, "rows": _digest(rows.tokens)}
    described["start_from"] = None if options.start_from is None else str(options.start_from)
    _require_same_run(options.work, described)
    kept = KeptStates(options.work / "hidden", capture, rows.tokens, name) if options.keeps_hidden else None
    run = TrainingRun(
        recipe.method,
        recipe,
        {"drafter": drafter},
        RunOptions(
            work_folder=options.work,
            compiled=False,
            stop_after_step=options.stop_after_step,
            checkpoint_every_s=options.checkpoint_every_s,
        ),
        vocabulary_sizes=frozenset({capture.parts.vocab_size, _num_drafted_ids(training)}),
    )
    drafter.train()
    run.run(_steps(recipe, options, training, capture, kept, rows, run))
    _store(training, options)
    report: dict[str, Any] = {
        "recipe": asdict(recipe),
        "target": str(options.target),
        "elapsed_s": round(run.elapsed_s, 1),
        "trained_tokens": recipe.steps * recipe.accumulate * recipe.batch_rows * recipe.row_length,
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
    }
    if options.eval_texts:
        console.print("measuring acceptance")
        drafter.eval()
        report["acceptance"] = evaluate_acceptance(
            capture,
            drafter,
            _beginnings(held_out, separator, options.eval_texts),
            num_generated=options.eval_tokens,
            num_drafted=recipe.depth,
            seed=recipe.seed,
        )
    (options.out / EVALUATION_FILE).write_text(json.dumps(report, indent=2) + "\n")
    return report


def _start_from(drafter: Drafter, folder: Path) -> None:
    """Give a drafter the weights of another.

    Raises:
        ConfigError: that is of another kind, or of other shapes.
        CheckpointError: the folder cannot be read.
    """
    other = load_drafter(folder, drafter.target)
    if type(other) is not type(drafter):
        raise ConfigError(
            f"--start-from {folder} holds {type(other).__name__}, not {type(drafter).__name__}: leave it out"
        )
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in other.state_dict().items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ConfigError(
                f"--start-from {folder}: {name} is {found.get(name)} there, and {wanted.get(name)} here: "
                "give the options that it was trained with"
            )
    drafter.load_state_dict(other.state_dict())


def _store(training: Training, options: TrainOptions) -> None:
    """Write the weights, and go on with what was written. Tables of positions are no weights: they stay."""
    stored: torch.dtype = getattr(torch, options.stored_dtype)
    for parameter in training.drafter.parameters():
        parameter.data = parameter.data.to(stored)
    training.save(options.out, str(options.target), options.layout)
    for parameter in training.drafter.parameters():
        parameter.data = parameter.data.to(torch.float32)


def _steps(
    recipe: DrafterRecipe,
    options: TrainOptions,
    training: Training,
    capture: Capture,
    kept: KeptStates | None,
    rows: Rows,
    run: TrainingRun,
) -> Any:
    device = capture.model.device
    is_mixed = capture.model.dtype == torch.bfloat16

    def target_rows(number: int) -> TargetRows:
        indices = rows.indices(number)
        tokens = rows.tokens[indices]
        states = capture.states(tokens) if kept is None else kept.states(indices)
        reads = states.dtype if is_mixed else torch.float32
        return TargetRows(
            tokens=tokens.to(device),
            hidden=capture.hidden(states).to(reads),
            final=capture.final(states),
            logits=capture.logits(states),
        )

    def step(number: int) -> dict[str, float]:
        sums: dict[str, float] = {}
        for part in range(recipe.accumulate):
            batch = target_rows(number * recipe.accumulate + part)
            with torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
                loss, logged = training.loss(batch, run.generator)
            (loss / recipe.accumulate).backward()
            for name, value in logged.items():
                sums[name] = sums.get(name, 0.0) + value / recipe.accumulate
        run.step_optimizers(number)
        return sums

    return step


def _require_same_run(work: Path, described: dict[str, Any]) -> None:
    """Note what is trained in ``work``; a checkpoint of something else there is not gone on from."""
    file = work / "run.json"
    described = json.loads(json.dumps(described))
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(described, indent=2) + "\n")
        return
    before: dict[str, Any] = json.loads(file.read_text())
    for name, value in described.items():
        if before.get(name) != value:
            raise ConfigError(
                f"{work} holds a run with {name} {before.get(name)!r}, not {value!r}: give another --work, "
                "or remove the folder to start anew"
            )


def _digest(rows: torch.Tensor) -> str:
    return hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:16]


def _load(options: TrainOptions) -> PreTrainedModel:
    open_checkpoint(options.target)
    has_gpu = torch.cuda.is_available()
    if options.device == "cuda" and not has_gpu:
        raise ResourceError("--device cuda: no GPU is there")
    device = "cuda" if options.device == "cuda" or (options.device == "auto" and has_gpu) else "cpu"
    # On a CPU without units for it, a step in bfloat16 takes more than twice as long.
    is_bfloat16 = options.dtype == "bfloat16" or (options.dtype == "auto" and device == "cuda")
    model: PreTrainedModel = _AUTO_MODEL.from_pretrained(
        options.target,
        dtype=torch.bfloat16 if is_bfloat16 else torch.float32,
        local_files_only=True,
        trust_remote_code=False,
    )
    torch.nn.Module.to(model, device)
    return model.eval().requires_grad_(requires_grad=False)


def _num_drafted_ids(training: Training) -> int:
    vocabulary = training.drafter.vocabulary
    return training.drafter.target.vocab_size if vocabulary is None else vocabulary.size


def _sampled(
    model: PreTrainedModel, rows: Rows, recipe: DrafterRecipe, options: TrainOptions
) -> torch.Tensor:
    """int64 [samples, T]: beginnings of rows that the target goes on with; made once."""
    prompt_length = min(_PROMPT_LENGTH, recipe.row_length // 2)
    if options.samples < recipe.batch_rows:
        raise ConfigError(f"--samples must be at least --batch-rows ({recipe.batch_rows}), or 0")
    name = f"samples-{options.samples}-{recipe.row_length}-{recipe.seed}-{options.sample_temperature}.pt"
    path = options.work / name
    if path.exists():
        stored: torch.Tensor = torch.load(path, weights_only=True)  # noqa: TID251 - our own file
        return stored
    console.print("sampling from the target")
    written: list[torch.Tensor] = []
    for start in range(0, options.samples, _SAMPLED_AT_ONCE):
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
        written.append(torch.cat([prompts, continuation], dim=1))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(torch.cat(written), path)
    return torch.cat(written)


def _beginnings(held_out: list[Any], separator: int, num_texts: int) -> torch.Tensor:
    """int64 [<= num_texts, P]: beginnings of held-out documents, all of one length."""
    whole = torch.cat([torch.tensor([separator, *document.tolist()]) for document in held_out])
    length = min(_PROMPT_LENGTH, max(2, len(whole) // num_texts))
    count = max(1, min(num_texts, len(whole) // length))
    stride = len(whole) // count
    return torch.stack([whole[i * stride : i * stride + length] for i in range(count)])
