"""Goes on with a long test run that was cut: `pytest --kept=FILE`.

What passes is written to the file as it does; what has passed before is left out. Both hold for one committed
tree alone: where anything differs from what is committed, nothing is written and nothing left out.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

_STEPS = 3
"""Set-up, the test itself, and what comes after it."""


def committed_tree(folder: Path) -> str:
    """Return the name that git has for the files of a checkout.

    Raises:
        pytest.UsageError: it is not a checkout, or something in it is not committed.
    """
    try:
        changed = _git(folder, "status", "--porcelain")
        tree = _git(folder, "rev-parse", "HEAD^{tree}")
    except (OSError, subprocess.CalledProcessError) as error:
        raise pytest.UsageError(f"--kept needs a git checkout: {error}") from error
    if changed:
        first = changed.splitlines()[0].strip()
        raise pytest.UsageError(f"--kept is for what is committed, and this is not: {first}")
    return tree


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


class KeptResults:
    """The file, for one tree. A pytest-xdist worker only reads it; the process that asked for it writes."""

    def __init__(self, path: Path, tree: str, *, is_writing: bool) -> None:
        self._path = path
        self._tree = tree
        self._is_writing = is_writing
        self._passed = self._read()
        self._steps: Counter[str] = Counter()
        self.num_left_out = 0

    def _read(self) -> frozenset[str]:
        if not self._path.exists():
            return frozenset()
        passed = set()
        for line in self._path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the run was cut while it wrote this line
            if entry["tree"] == self._tree:
                passed.add(entry["test"])
        return frozenset(passed)

    def leave_out(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Take what has passed out of `items`, in place."""
        left_out = [item for item in items if item.nodeid in self._passed]
        if left_out:
            self.num_left_out = len(left_out)
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid not in self._passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._is_writing or not report.passed:
            return
        self._steps[report.nodeid] += 1
        if self._steps[report.nodeid] == _STEPS:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"tree": self._tree, "test": report.nodeid}) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(
            f"{len(self._passed)} tests of tree {self._tree[:12]} had passed before ({self._path})"
        )


_KEPT = pytest.StashKey[KeptResults]()


def add_option(parser: pytest.Parser) -> None:
    """Let pytest know of `--kept`."""
    parser.addoption(
        "--kept",
        type=Path,
        metavar="FILE",
        help="leave out what has passed in this committed tree, and write what passes: a run that was cut "
        "goes on (make test-all ARGS='--kept=runs/test-all.jsonl'); with `=`, or pytest takes the "
        "file for one of tests",
    )


def configure(config: pytest.Config) -> None:
    """Begin with `--kept`, if it is there."""
    path: Path | None = config.getoption("--kept")
    if path is None:
        return
    kept = KeptResults(path, committed_tree(config.rootpath), is_writing=not hasattr(config, "workerinput"))
    config.stash[_KEPT] = kept
    config.pluginmanager.register(kept, "kept-results")


def leave_out_kept(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take what has passed before out of `items`, in place, where `--kept` asks for that."""
    if (kept := config.stash.get(_KEPT, None)) is not None:
        kept.leave_out(config, items)
