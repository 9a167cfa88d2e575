"""`drafthouse keys`: make API keys."""

from __future__ import annotations

import typer

from deploy.api_keys import line_of, new_api_key


def print_new_key(
    name: str, max_concurrency: int | None, tokens_per_minute: int | None, min_priority: int
) -> None:
    """Print a new key and the line that lets a server accept it. Neither is kept anywhere.

    Raises:
        ConfigError: the name cannot stand in the file.
    """
    text, key = new_api_key(
        name,
        max_concurrency=max_concurrency,
        tokens_per_minute=tokens_per_minute,
        min_priority=min_priority,
    )
    typer.secho("the key, for its owner; it is shown this once and kept nowhere:", dim=True, err=True)
    typer.echo(text)
    typer.secho(
        "the line for http.api_keys_file, which running servers read by themselves:", dim=True, err=True
    )
    typer.echo(line_of(key))
