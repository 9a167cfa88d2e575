"""Command line of the recipes: ``python -m training --help``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from training.corpus import load_corpus
from training.datasets import tokenize_corpus
from training.progress import console
from training.target import TargetRecipe, target_config, train_target
from training.tokenizer import load_tokenizer, train_tokenizer

app = typer.Typer(help="Recipes of the demo model family: tokenizer, target, draft, evaluation.", no_args_is_help=True)

Models = Annotated[Path, typer.Option(help="Folder that holds target/ and draft/.")]
Work = Annotated[Path, typer.Option(help="Folder for caches, checkpoints and logs.")]
Threads = Annotated[int, typer.Option(help="Torch threads.", min=1)]
MODELS, WORK = Path("models/demo"), Path("training/runs")


@app.command()
def tokenizer(models: Models = MODELS) -> None:
    """Train the tokenizer (seconds). Example: python -m training tokenizer"""
    trained = train_tokenizer(file.text for file in load_corpus().train)
    trained.save_pretrained(models / "target")
    console.print(f"{len(trained)} tokens -> {models / 'target'}")


@app.command()
def target(
    steps: Annotated[int, typer.Option(help="Optimizer steps; the learning rate reaches zero at the last.")] = 2600,
    models: Models = MODELS,
    work: Work = WORK,
    threads: Threads = 2,
    seed: int = 1,
) -> None:
    """Train the target, or continue an interrupted run with the same command.

    Example: taskset -c 0,1 python -m training target --steps 2600
    """
    torch.set_num_threads(threads)
    tokens = load_tokenizer(models / "target")
    corpus = tokenize_corpus(tokens, load_corpus(), work / "tokens")
    recipe = TargetRecipe(steps=steps, seed=seed)
    config = target_config(tokens.eos_token_id, tokens.pad_token_id)
    training, elapsed_s = train_target(recipe, config, corpus.train, work_folder=work / "target")
    from training.export import save_target

    save_target(training, tokens, models / "target")
    console.print(f"trained {elapsed_s:.0f} s -> {models / 'target'}")


if __name__ == "__main__":
    app()
