"""`drafthouse config`: check and describe configuration files."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from deploy.cli.progress import as_typed
from deploy.config import DrafthouseConfig
from deploy.config_file import load_config
from deploy.preflight import check_endpoint, check_models, warnings_of
from specdec.engine.config import EngineConfig
from specdec.model.config import ModelConfig
from specdec.proposers.config import SpeculativeConfig


def validate_file(file: Path) -> None:
    """Check the file and what it names (models, keys, certificates, packages); say so when all is well.

    Of models all is checked that can be told without reading their weights; `serve` leaves much of that to
    the workers, which load them anyway. What depends on the machine and the command line is left to `serve`:
    whether the workers fit, whether the port is free, and whether others may come without a key.

    Raises:
        UserError: what is wrong, and where.
    """
    config = load_config(file)
    for model in config.served_models():
        check_models(model.engine)
        for text in warnings_of(model.engine):
            typer.echo(f"warning: {text}", err=True)
    check_endpoint(config.http)
    from specdec.engine.paper_check import check_on_paper  # seconds, of which the schema needs none

    for model in config.served_models():
        check_on_paper(model.engine)
    typer.echo(f"{file}: ok ({summary_of(config)})")


def summary_of(config: DrafthouseConfig) -> str:
    """Return one line on what a configuration serves."""
    first, *further = (_summary(model.engine) for model in config.served_models())
    return "; ".join([first, *(f"{name}: {text}" for name, text in zip(config.models, further, strict=True))])


def _summary(config: EngineConfig) -> str:
    target = f"target {as_typed(config.target.model)} in {_numbers(config.target)}"
    speculative = config.speculative_config
    if speculative.method == "none":
        return f"{target}, no drafter"
    each = " or ".join(map(_drafter, speculative.choices))
    return f"{target}, drafter {each}, k = {speculative.num_speculative_tokens}"


def _drafter(speculative: SpeculativeConfig) -> str:
    drafter: str = speculative.method
    if speculative.model is not None:
        drafter += f" {as_typed(speculative.model)}"
    if speculative.quantization is not None:
        drafter += f" in {speculative.quantization}"
    return drafter


def _numbers(model: ModelConfig) -> str:
    return model.dtype if model.quantization is None else f"{model.dtype}, weights in {model.quantization}"


def print_schema() -> None:
    """Print the JSON schema."""
    typer.echo(json.dumps(DrafthouseConfig.model_json_schema(), indent=2))
