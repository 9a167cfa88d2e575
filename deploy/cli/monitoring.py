"""`drafthouse dashboards` and `drafthouse rules`: what watches a server, into Grafana and into files."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from deploy.cli.progress import shown
from deploy.monitoring.dashboards import ALL_DASHBOARDS
from deploy.monitoring.objectives import Objectives
from deploy.monitoring.rules import rules_yaml
from specdec.core.errors import UserError
from specdec.core.extras import how_to_install

_PACKAGES = ("grafana_client", "grafana_foundation_sdk")


def push(url: str, token_file: Path, folder: str) -> None:
    """Put all dashboards into a Grafana, and say what has become of each.

    Raises:
        UserError, GrafanaUnavailable: as `push_dashboards`, or the extra or the token is missing.
    """
    pages, token = _pages(), _token(token_file)
    from deploy.monitoring.push import push_dashboards

    console = Console(stderr=True, highlight=False)
    with shown(console, "asking Grafana") as progress:
        pushed = push_dashboards(pages, url=url, token=token, folder=folder, progress=progress)
    for one in pushed:
        typer.echo(f"{one.change:<9}  {one.title}  {one.url}")


def write_dashboards(folder: Path) -> None:
    """Write all dashboards as JSON files, named after their uids."""
    pages = _pages()
    from deploy.monitoring.grafana import dashboard_file

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for page in pages:
            name, text = dashboard_file(page)
            file = folder / name
            file.write_text(text)
            typer.echo(f"wrote {file}")
    except OSError as error:
        raise UserError(f"cannot write dashboards to {folder}: {error.strerror}") from error


def write_rules(file: Path, objectives: Objectives, runbook: str) -> None:
    """Write the rules of Prometheus; `-` is standard output."""
    text = rules_yaml(objectives, runbook=runbook)
    if str(file) == "-":
        typer.echo(text, nl=False)
        return
    try:
        file.write_text(text)
    except OSError as error:
        raise UserError(f"cannot write rules to {file}: {error.strerror}") from error
    typer.echo(f"wrote {file}")


def _pages() -> list[dict[str, Any]]:
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"dashboards need {' and '.join(missing)}: {how_to_install('grafana')} "
            "(docs/operations/watching.md#dashboards says where)"
        )
    from deploy.monitoring.grafana import grafana_json

    return [grafana_json(page) for page in ALL_DASHBOARDS]


def _token(file: Path) -> str:
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"cannot read the token file {file}: {reason}") from error
    if not token or any(character.isspace() or not character.isascii() for character in token):
        raise UserError(
            f"the token file {file} must hold one token of a Grafana service account (glsa_...), and "
            "nothing else"
        )
    return token
