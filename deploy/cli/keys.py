"""`drafthouse keys`: make API keys."""

from __future__ import annotations

from pathlib import Path

import typer

from deploy.api_keys import add_api_key, line_of, new_api_key


def print_new_key(
    name: str,
    max_concurrency: int | None,
    tokens_per_minute: int | None,
    min_priority: int,
    file: Path | None,
) -> None:
    """Print a new key, which is kept nowhere, and the line that lets a server accept it.

    Args:
        file: the line is added to it, instead of being printed.

    Raises:
        ConfigError: the name cannot stand in the file, or the line cannot be added to it.
    """
    text, key = new_api_key(
        name,
        max_concurrency=max_concurrency,
        tokens_per_minute=tokens_per_minute,
        min_priority=min_priority,
    )
    if file is not None:
        add_api_key(file, key)
    typer.secho("the key, for its owner; it is shown this once and kept nowhere:", dim=True, err=True)
    typer.echo(text)
    if file is not None:
        typer.secho(
            f"{file} has its line now; servers that read it take it by themselves", dim=True, err=True
        )
        return
    typer.secho(
        "the line for http.api_keys_file, which running servers read by themselves:", dim=True, err=True
    )
    typer.echo(line_of(key))
