"""The `drafthouse` command."""

from deploy.cli.main import main as main
