from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import typer

from benchmarks.matrix_unit import compiler_without, require_matrix_unit


def test_processors_without_the_unit_are_refused(tmp_path: Path) -> None:
    cpu_info = tmp_path / "cpuinfo"
    cpu_info.write_text("flags\t\t: fpu avx512_bf16 amx_tile\n")
    with pytest.raises(typer.BadParameter, match=r"no matrix unit: amx_bf16 missing"):
        require_matrix_unit(cpu_info)
    cpu_info.write_text("flags\t\t: fpu amx_bf16 avx512_bf16 amx_tile\n")
    require_matrix_unit(cpu_info)


def test_a_compiler_that_does_not_know_the_unit(tmp_path: Path) -> None:
    def macros(compiler: str) -> str:
        flags = ["-march=sapphirerapids", "-dM", "-E", "-x", "c++", "/dev/null"]
        done = subprocess.run([compiler, *flags], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip("the compiler is for another kind of processor, or does not know this one")
        return done.stdout

    assert "__AMX_BF16__" in macros("g++")
    others = macros(str(compiler_without(tmp_path)))
    assert "__AMX_BF16__" not in others
    assert "__AMX_TILE__" not in others
    assert "__AVX512BF16__" in others
