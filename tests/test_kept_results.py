"""A run that was cut goes on: what passed is left out, for the same committed tree alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = """
from tests import kept_results

def pytest_addoption(parser):
    kept_results.add_option(parser)

def pytest_configure(config):
    kept_results.configure(config)

def pytest_collection_modifyitems(config, items):
    kept_results.leave_out_kept(config, items)
"""
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_right(number):
    pass

def test_wrong():
    raise AssertionError

@pytest.fixture
def breaks_afterwards():
    yield
    raise AssertionError

def test_broken_afterwards(breaks_afterwards):
    pass
"""


def commit(folder: Path) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    for arguments in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "tests"]):
        subprocess.run(["git", *arguments], cwd=folder, check=True)


@pytest.fixture
def checkout(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # most of the time would go into those
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_some=TESTS)
    pytester.path.joinpath(".gitignore").write_text("kept.jsonl\n__pycache__/\nrunpytest-*\nstdout\nstderr\n")
    commit(pytester.path)
    return pytester


def run(checkout: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return checkout.runpytest_subprocess("-p", "no:cacheprovider", "--kept=kept.jsonl", *arguments)


@pytest.mark.parametrize("processes", [[], ["-p", "xdist", "-n", "2"]], ids=["one", "several"])
def test_what_passed_is_left_out(checkout: pytest.Pytester, processes: list[str]) -> None:
    run(checkout, *processes).assert_outcomes(passed=4, failed=1, errors=1)
    kept = [json.loads(line) for line in (checkout.path / "kept.jsonl").read_text().splitlines()]
    assert sorted(entry["test"] for entry in kept) == [f"test_some.py::test_right[{i}]" for i in range(3)]
    again = run(checkout, *processes)
    again.assert_outcomes(passed=1, failed=1, errors=1, deselected=0 if processes else 3)
    again.stdout.fnmatch_lines(["3 tests of tree * had passed before*"])


def test_another_tree_begins_anew(checkout: pytest.Pytester) -> None:
    run(checkout)
    (checkout.path / "test_more.py").write_text("def test_more():\n    pass\n")
    commit(checkout.path)
    run(checkout).assert_outcomes(passed=5, failed=1, errors=1)


def test_half_a_line_is_passed_over(checkout: pytest.Pytester) -> None:
    run(checkout)
    with (checkout.path / "kept.jsonl").open("a") as file:
        file.write('{"tree": "')
    run(checkout).assert_outcomes(passed=1, failed=1, errors=1, deselected=3)


def test_what_is_not_committed_is_refused(checkout: pytest.Pytester) -> None:
    (checkout.path / "test_more.py").write_text("def test_more():\n    pass\n")
    refused = run(checkout)
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["*this is not: ?? test_more.py"])
    assert not (checkout.path / "kept.jsonl").exists()
