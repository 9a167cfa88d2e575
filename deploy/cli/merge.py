"""`drafthouse merge`: a model folder from a base model and what a fine-tuning has added to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deploy.cli.border import DebugOption


def merge(
    base: Annotated[Path, typer.Option(help="Folder of the model that the adapter was trained on.")],
    adapter: Annotated[Path, typer.Option(help="Folder of the adapter, in the layout of peft.")],
    out: Annotated[Path, typer.Option(help="Folder for the model; it must not exist.")],
    debug: DebugOption = False,
) -> None:
    """Make a model of a base model and a low-rank adapter (LoRA), in the base's dtype.

    Example:

        drafthouse merge --base models/demo/target --adapter medusa2/adapter --out medusa2/target
    """
    from specdec.model.adapter import merge_adapter

    num_matrices = merge_adapter(base, adapter, out)
    typer.echo(f"added to {num_matrices} matrices -> {out}", err=True)
