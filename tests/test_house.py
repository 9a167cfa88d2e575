"""The house around the code: packaging, layers, pins: rules that a commit could break unseen."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("specdec", "workers", "cluster", "deploy", "training")
OPTIONAL_DEPENDENCIES = ("triton", "flashinfer", "llguidance", "torchao")
"""A module of specdec may need one of these; the engine must import without it all the same."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def pin_constraints() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pin_constraints", ROOT / "scripts" / "pin_constraints.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_modules_that_start_ray_are_kept_in_one_process() -> None:
    """By `make test`, which knows them by their path: there is one cluster at a time."""
    from tests.conftest import STARTING_RAY

    marked = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__) and "pytest.mark.ray" in path.read_text()
    ]
    assert len(marked) > 4
    assert [name for name in marked if not name.startswith(STARTING_RAY)] == []


def names_a_test_module(node: ast.AST) -> bool:
    """Whether a statement imports a module of tests, or from one."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        origin = node.module if node.level == 0 else f"tests.{node.module or ''}"
        names = [f"{origin}.{alias.name}" for alias in node.names]
    else:
        return False
    return any(name.startswith("tests.") and ".test_" in name for name in names)


def test_nobody_imports_from_a_test_module() -> None:
    """A test module holds tests; what several need is support, in a module of its own beside them."""
    offenders = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if names_a_test_module(node)
    ]
    assert offenders == []


@pytest.mark.parametrize(
    ("statement", "is_one"),
    [
        ("from tests.specdec.engine.test_engine import models", True),
        ("from tests.specdec.engine import test_engine as engine", True),
        ("import tests.specdec.engine.test_engine", True),
        ("from .test_engine import models", True),
        ("from . import test_engine", True),
        ("from tests.specdec.engine.toy_engines import request", False),
        ("from torch.testing import assert_close", False),
    ],
)
def test_what_is_an_import_from_a_test_module(statement: str, is_one: bool) -> None:
    assert names_a_test_module(ast.parse(statement).body[0]) is is_one


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_typed_and_described(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_with_code_is_a_package(package: str) -> None:
    """A folder without __init__.py would import here (as a namespace) and escape the layer contracts."""
    folders = {path.parent for path in (ROOT / package).rglob("*.py") if "runs" not in path.parts}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_print_in_packages(package: str) -> None:
    """Ruff says so too, but a `noqa` would silence ruff; what a server prints nobody can switch off."""
    prints = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert prints == []


def test_import_layers() -> None:
    result = run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache", COLUMNS="200")
    assert result.returncode == 0, result.stdout + result.stderr


def test_engine_imports_without_ray() -> None:
    """Every module of specdec, in a process where Ray and the server's dependencies do not exist."""
    program = f"""
        import importlib, importlib.abc, pkgutil, sys

        absent = {{"ray", "fastapi", "starlette", "uvicorn", "workers", "cluster", "deploy", "training"}}

        class Absent(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in absent:
                    raise ModuleNotFoundError(f"{{name}} is absent in this test", name=name)

        sys.meta_path.insert(0, Absent())
        import specdec

        for module in pkgutil.walk_packages(specdec.__path__, "specdec."):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "").partition(".")[0] not in {OPTIONAL_DEPENDENCIES!r}:
                    raise
        print("imported")
    """
    result = run(sys.executable, "-c", textwrap.dedent(program))
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("imported\n")


def test_version_is_one(project: dict[str, Any]) -> None:
    import specdec

    version = project["project"]["version"]
    assert specdec.__version__ == version
    assert metadata.version("drafthouse") == version, "run `make install`"
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_ranges_admit_the_pins(project: dict[str, Any], pins: dict[str, str]) -> None:
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    for requirement in (Requirement(text) for group in groups for text in group):
        name = canonicalize_name(requirement.name)
        if name in {"drafthouse", "triton", "flashinfer-python"}:  # the last two need CUDA, and are not here
            continue
        assert Version(pins[name]) in requirement.specifier, f"{requirement} does not admit {pins[name]}"


def test_everything_installed_is_pinned(pins: dict[str, str], pin_constraints: ModuleType) -> None:
    """A dependency of a dependency that nobody pinned would change under a newcomer's feet."""
    differing = {
        name: version
        for name, version in pin_constraints.tested_versions().items()
        if pins.get(name) != version and not pin_constraints.comes_with_torch(name)
    }
    assert differing == {}, "run `make install`, or after a change of dependencies `make pin`"


def test_pins_name_versions_not_builds(pins: dict[str, str]) -> None:
    """`torch==2.13.0+cpu` would resolve from one index only."""
    assert [pin for pin in pins.items() if Version(pin[1]).local] == []


def test_wheel_holds_the_packages_and_nothing_else(tmp_path: Path, project: dict[str, Any]) -> None:
    result = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    dist_info = f"drafthouse-{project['project']['version']}.dist-info"
    assert tops == {*PACKAGES, dist_info}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert [name for name in names if name.endswith((".safetensors", ".pt", ".pyc"))] == []
    assert {f"{dist_info}/entry_points.txt", f"{dist_info}/licenses/LICENSE"} <= set(names)


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    described = set(re.findall(r"^([a-z-]+):[^#\n]*## ", makefile, flags=re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert targets == described == set(phony.split())


def test_scripts_are_executable() -> None:
    for name in (".ci/run", "scripts/install"):
        assert os.access(ROOT / name, os.X_OK), name
