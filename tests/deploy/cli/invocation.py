"""The command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from deploy.cli.main import app

runner = CliRunner()


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = runner.invoke(app, list(map(str, arguments)))
    return result.exit_code, result.stdout, result.stderr


def user_error(*arguments: object) -> str:
    """Run a command that must fail as a user's mistake, and return its message."""
    code, _, stderr = invoke(*arguments)
    assert code == 2
    assert "Traceback" not in stderr
    return stderr
