"""The token function as compiled code for CPUs: builds `csrc/token_function.cpp` and calls it.

The shared library has a plain C interface and knows nothing of torch, so it compiles in about a second.
It is kept in a cache folder under a name that covers source, flags, compiler and instruction set.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from specdec.core.proposal import NoiseStream
from specdec.sampling.noise import MULTIPLIER_1, MULTIPLIER_2, STREAM_TAGS, WEYL
from specdec.sampling.rows import SamplingRows

_SOURCE = Path(__file__).parent / "csrc" / "token_function.cpp"
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-ffp-contract=off",  # a fused multiply-add would round scores differently from the definition
    f"-DDH_WEYL={WEYL:#x}ULL",
    f"-DDH_MULTIPLIER_1={MULTIPLIER_1:#x}ULL",
    f"-DDH_MULTIPLIER_2={MULTIPLIER_2:#x}ULL",
)
_LOGITS_PER_THREAD = 1 << 19
"""Below about 0.3 ms of work per thread, waking another one costs more than it gives."""


class NativeBuildError(Exception):
    """The library cannot be built here; the text says why."""


def default_cache_dir() -> Path:
    """Return the folder for compiled artefacts of this user."""
    return Path.home() / ".cache" / "drafthouse" / "compile"


def build_library(cache_dir: Path) -> Path:
    """Return the path of the shared library, compiled now unless the cache has it.

    Safe beside other processes that build the same: the file appears whole or not at all.

    Raises:
        NativeBuildError: there is no C++ compiler, or it fails.
    """
    compiler = next(filter(None, map(shutil.which, ("g++", "clang++"))), None)
    if compiler is None:
        raise NativeBuildError("no C++ compiler (g++ or clang++) on the path")
    # The predefined macros name the compiler's version and every instruction set of this machine.
    macros = _run([compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    key = hashlib.sha256("\0".join((macros, _SOURCE.read_text(), *_FLAGS)).encode()).hexdigest()[:16]
    library = cache_dir / f"token_function-{key}.so"
    if not library.exists():
        try:
            cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
                fresh = Path(folder) / library.name
                _run([compiler, *_FLAGS, str(_SOURCE), "-o", str(fresh)])
                fresh.replace(library)
        except OSError as error:
            raise NativeBuildError(f"cannot write to {cache_dir}: {error}") from error
    return library


class NativeTokenFunction:
    """`sampler.sample_eager` for fp32 logits on a CPU: the same choices, about fifty times as fast."""

    def __init__(self, library: Path) -> None:
        self._sample_rows = ctypes.CDLL(str(library)).dh_sample_rows
        self._sample_rows.restype = None
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._sample_rows.argtypes = (
            *(pointer, integer, integer, integer),
            *(pointer, pointer, ctypes.c_uint64, ctypes.c_int32),
            *(pointer, pointer),
        )

    def __call__(
        self, logits_RV: torch.Tensor, rows: SamplingRows, stream: NoiseStream
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (token ids int64 [R], finite bool [R]) of fp32 CPU logits whose rows are contiguous."""
        assert logits_RV.dtype == torch.float32
        assert logits_RV.stride(1) == 1
        assert rows.integers.is_contiguous()
        assert rows.reals.is_contiguous()
        num_rows, vocab_size = logits_RV.shape
        num_threads = min(torch.get_num_threads(), 1 + num_rows * vocab_size // _LOGITS_PER_THREAD)
        token_ids_R = torch.empty(num_rows, dtype=torch.int64)
        finite_R = torch.empty(num_rows, dtype=torch.bool)
        self._sample_rows(
            *(logits_RV.data_ptr(), logits_RV.stride(0), num_rows, vocab_size),
            *(rows.integers.data_ptr(), rows.reals.data_ptr(), STREAM_TAGS[stream], num_threads),
            *(token_ids_R.data_ptr(), finite_R.data_ptr()),
        )
        return token_ids_R, finite_R


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NativeBuildError(f"{' '.join(command[:1])} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
