"""`drafthouse config`: check and describe configuration files."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from deploy.config import DrafthouseConfig
from deploy.config_file import load_config
from specdec.model.checkpoint import open_checkpoint


def validate_file(file: Path) -> None:
    """Check the file and the model folders it names; say so when all is well.

    Raises:
        UserError: what is wrong, and where.
    """
    config = load_config(file)
    for model in (config.target.model, config.speculative_config.model):
        if model is not None:
            open_checkpoint(model)
    typer.echo(f"{file}: ok ({summary_of(config)})")


def summary_of(config: DrafthouseConfig) -> str:
    """Return one line on what a configuration serves."""
    speculative = config.speculative_config
    drafter: str = speculative.method
    if speculative.model is not None:
        drafter += f" {Path(speculative.model).name}"
    if speculative.method != "none":
        drafter += f", k = {speculative.num_speculative_tokens}"
    return f"target {Path(config.target.model).name} in {config.target.dtype}, drafter {drafter}"


def print_schema() -> None:
    """Print the JSON schema."""
    typer.echo(json.dumps(DrafthouseConfig.model_json_schema(), indent=2))
