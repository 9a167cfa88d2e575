"""Command line of the recipes: ``python -m training --help``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from training.card import write_card
from training.corpus import load_corpus
from training.datasets import tokenize_corpus
from training.divergence import DivergenceName
from training.draft_distillation import DraftRecipe, draft_config, train_draft
from training.export import load_model, save_draft, save_target
from training.family_report import evaluate_family
from training.progress import console
from training.prompts import select_prompts, write_prompts
from training.recipe_record import write_recipe
from training.run import RunOptions
from training.target import TargetRecipe, target_config, train_target
from training.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

app = typer.Typer(
    help="Recipes of the demo model family, in this order: tokenizer, target, draft, evaluate.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)

Models = Annotated[Path, typer.Option(help="Folder that holds target/ and draft/.")]
Work = Annotated[Path, typer.Option(help="Folder for caches, checkpoints and logs.")]
Threads = Annotated[int, typer.Option(help="Torch threads.", min=1)]
Steps = Annotated[
    int, typer.Option(help="Optimizer steps; the learning rate reaches zero at the last.", min=1)
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of initial weights, data order and samples.")]
MODELS, WORK = Path("models/demo"), Path("training/runs")


@app.command()
def tokenizer(models: Models = MODELS) -> None:
    """Train the tokenizer (seconds) and choose the held-out prompts.

    Example: python -m training tokenizer
    """
    corpus = load_corpus()
    trained = train_tokenizer(file.text for file in corpus.train)
    save_tokenizer(trained, models / "target")
    write_prompts(select_prompts(corpus.held_out, trained), models / "prompts.jsonl")
    console.print(f"{len(trained)} tokens -> {models / 'target'}, prompts -> {models / 'prompts.jsonl'}")


@app.command()
def target(
    steps: Steps = TargetRecipe.steps,
    models: Models = MODELS,
    work: Work = WORK,
    threads: Threads = 2,
    seed: Seed = TargetRecipe.seed,
) -> None:
    """Train the target (about seventy minutes on two cores); the same command continues an interrupted run.

    Example: taskset -c 0,1 python -m training target --steps 2000
    """
    torch.set_num_threads(threads)
    tokens = load_tokenizer(models / "target")
    corpus = tokenize_corpus(tokens, load_corpus(), work / "tokens")
    recipe = TargetRecipe(steps=steps, seed=seed)
    config = target_config()
    training, elapsed_s = train_target(recipe, config, corpus.train, RunOptions(work_folder=work / "target"))
    save_target(training, tokens, models / "target")
    options = f"--steps {steps} --threads {threads} --seed {seed}"
    write_recipe(
        models / "target",
        recipe,
        command=f"python -m training target {options}",
        elapsed_s=elapsed_s,
        threads=threads,
    )
    console.print(f"trained {elapsed_s:.0f} s -> {models / 'target'}")


@app.command()
def draft(
    steps: Steps = DraftRecipe.steps,
    divergence: Annotated[
        DivergenceName, typer.Option(help="Mixed with forward KL once generated rows begin.")
    ] = DraftRecipe.late_divergence,
    models: Models = MODELS,
    work: Work = WORK,
    threads: Threads = 2,
    seed: Seed = DraftRecipe.seed,
) -> None:
    """Distil the draft from the trained target; the same command continues an interrupted run.

    Example: taskset -c 0,1 python -m training draft
    """
    torch.set_num_threads(threads)
    tokens = load_tokenizer(models / "target")
    corpus = tokenize_corpus(tokens, load_corpus(), work / "tokens")
    recipe = DraftRecipe(steps=steps, late_divergence=divergence, seed=seed)
    config = draft_config()
    teacher = load_model(models / "target")
    distilled, elapsed_s = train_draft(
        recipe, teacher, config, corpus.train, RunOptions(work_folder=work / "draft")
    )
    save_draft(distilled, tokens, models / "draft")
    options = f"--steps {steps} --divergence {divergence} --threads {threads} --seed {seed}"
    write_recipe(
        models / "draft",
        recipe,
        command=f"python -m training draft {options}",
        elapsed_s=elapsed_s,
        threads=threads,
    )
    console.print(f"distilled {elapsed_s:.0f} s -> {models / 'draft'}")


@app.command()
def evaluate(models: Models = MODELS, work: Work = WORK, threads: Threads = 2) -> None:
    """Measure target, draft and MTP module on the held-out files; write evaluation.json and the model card.

    Example: taskset -c 0,1 python -m training evaluate
    """
    torch.set_num_threads(threads)
    corpus = load_corpus()
    tokenized = tokenize_corpus(load_tokenizer(models / "target"), corpus, work / "tokens")
    report = evaluate_family(models, corpus, tokenized)
    (models / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")
    write_card(models, report)
    console.print(f"report -> {models / 'evaluation.json'}, card -> {models / 'README.md'}")


if __name__ == "__main__":
    app()
