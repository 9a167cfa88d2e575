"""Builds the C++ kernels that come with the package, once per machine, and loads them.

The sources have a plain C interface (no PyTorch headers): a build takes a few seconds and does not depend
on the PyTorch version. Libraries are cached under a name that covers everything they depend on: sources,
flags and instruction set, and apart from these the compiler. Processes may share the folder: a build happens
under a file lock and appears by rename, a digest beside it is checked before it is loaded, and what fails the
check is rebuilt. What passes is loaded as it is, so that a filled folder may be read-only; where nothing can
be built, what another compiler has built of the same sources does as well.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import torch

from specdec.core.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_CACHE_DIR = Path("~/.cache/drafthouse/compile")
_COMPILERS = ("g++", "c++")
_FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fopenmp",
    "-pthread",
)
_BUILD_TIMEOUT_S = 300.0
_LOCK_TIMEOUT_S = 2.0 * _BUILD_TIMEOUT_S
"""Nobody builds for longer; who holds the lock then has been stopped, or is another one who begins anew."""
_LOCK_LOOK_S = 0.1
_TOLD_AFTER_S = 10.0
_NOT_EXECUTABLE = "failed to map segment"
"""What the loader says of a library on a file system that is mounted so (noexec)."""


class NativeUnavailable(Exception):
    """The kernels cannot be built or loaded here; the text says why. Everything runs without them."""


def resolve_cache_dir(cache_dir: str | Path | None) -> Path:
    """Return the folder of compiled artefacts: `cache_dir`, or the default one in the user's home.

    Raises:
        ConfigError: there is no such home.
    """
    try:
        return Path(DEFAULT_CACHE_DIR if cache_dir is None else cache_dir).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"compile.cache_dir: {error}: give a folder, or set HOME") from error


@functools.cache
def load_library(source: Path, cache_dir: Path) -> ctypes.CDLL:
    """Return the library built from the C++ file `source`, from the cache or freshly built.

    Headers may lie in the file's own folder and in `specdec/attention/csrc`. Only what has default visibility
    can be called. Calls release the GIL.

    Raises:
        NativeUnavailable: it is not in the cache, and there is no compiler, its build fails, or the folder
            cannot be written; or it cannot be loaded.
    """
    includes = sorted({source.parent, Path(__file__).parent / "csrc"})
    stem = f"{source.stem}-{_code_key(includes)}"
    foreign: Path | None = None
    try:
        library = _built(source, includes, cache_dir, stem)
    except NativeUnavailable as error:
        foreign = next((one for one in sorted(cache_dir.glob(f"{stem}-*.so")) if _is_intact(one)), None)
        if foreign is None:
            raise
        library = foreign
        logger.info("%s is taken from the cache as it is, none can be built here: %s", library, error)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        if _NOT_EXECUTABLE in str(error):  # another one would fare no better there
            raise NativeUnavailable(
                f"cannot load {library}: {error}: set compile.cache_dir to a folder that programs may be run "
                "from"
            ) from error
        if foreign is None:  # or it would be found again, intact, at every start
            with suppress(OSError):
                library.unlink()
        raise NativeUnavailable(f"cannot load {library}: {error}") from error


def find_compiler() -> str:
    """Return the path of a C++ compiler: `$CXX`, or the first of g++ and c++.

    Raises:
        NativeUnavailable: there is none, or only clang, which calls an OpenMP runtime of its own (libomp):
            what it builds cannot be loaded beside PyTorch's libgomp.
    """
    wanted = os.environ.get("CXX")
    clang: str | None = None
    for name in (wanted,) if wanted else _COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        if _openmp_library() is None or "clang" not in _version_of(path):
            return path
        clang = path
    if clang is not None:
        raise NativeUnavailable(f"{clang} is clang, whose OpenMP is not PyTorch's (libgomp); install g++")
    raise NativeUnavailable(
        f"no C++ compiler found (CXX={wanted})"
        if wanted
        else f"no C++ compiler found ({', '.join(_COMPILERS)})"
    )


@functools.cache
def cpu_capability() -> str:
    """Digest of the instruction sets of this machine's CPU."""
    description = platform.machine() + platform.processor()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as cpuinfo:
            for line in cpuinfo:
                if line.startswith(("flags", "Features", "model name", "CPU part")):
                    description += line
                if not line.strip():
                    break
    except FileNotFoundError:
        pass  # not Linux: the architecture's name must do
    return hashlib.sha256(description.encode()).hexdigest()[:16]


def source_digest(folders: Sequence[Path]) -> str:
    """Digest of all C++ sources and headers in `folders`."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((*folder.glob("*.h"), *folder.glob("*.cpp"))):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _code_key(includes: Sequence[Path]) -> str:
    parts = (source_digest(includes), " ".join(_FLAGS), cpu_capability(), str(_openmp_library()))
    return _digest_of("\n".join(parts).encode())


@functools.cache
def _version_of(compiler: str) -> str:
    try:
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, errors="replace", check=False
        )
    except OSError:
        return ""  # its build says why
    return done.stdout


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _openmp_library() -> Path | None:
    """The OpenMP runtime that PyTorch brings along: a second one would have threads of its own, and the
    two pools would spin against each other.
    """
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return found[0] if found else None


def _built(source: Path, includes: Sequence[Path], cache_dir: Path, stem: str) -> Path:
    """Return the library of this machine's compiler, which is built only where none is there whole.

    Raises:
        NativeUnavailable: it is not there, and cannot be built.
    """
    compiler = find_compiler()
    target = cache_dir / f"{stem}-{_digest_of(_version_of(compiler).encode())}.so"
    if _is_intact(target):
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            if not _is_intact(target):
                _build(compiler, source, includes, target)
    except OSError as error:
        raise NativeUnavailable(f"cannot write the kernel cache {cache_dir}: {error}") from error
    return target


def _build(compiler: str, source: Path, includes: Sequence[Path], target: Path) -> None:
    openmp = _openmp_library()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        compiled, linked = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        include_flags = [f"-I{include}" for include in includes]
        _run([compiler, *_FLAGS, *include_flags, "-c", str(source), "-o", str(compiled)])
        _run([compiler, "-shared", str(compiled), str(openmp) if openmp else "-fopenmp", "-o", str(linked)])
        digest = Path(folder) / "digest"
        digest.write_text(hashlib.sha256(linked.read_bytes()).hexdigest(), encoding="ascii")
        os.replace(linked, target)
        os.replace(digest, target.with_suffix(".sha256"))
    logger.info("built %s into %s", source.name, target)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_BUILD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} did not finish within {_BUILD_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise NativeUnavailable(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        said = done.stderr.strip()[-1000:] or f"exit status {done.returncode}"
        raise NativeUnavailable(f"{' '.join(command)} failed: {said}")


def _is_intact(library: Path) -> bool:
    try:
        expected = library.with_suffix(".sha256").read_text(encoding="ascii", errors="replace")
        return hashlib.sha256(library.read_bytes()).hexdigest() == expected
    except OSError:
        return False  # not there, or not to be read


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep others from building the same meanwhile. What is built appears as a whole in any case: it is only
    to be built once, so that a lock that cannot be had is not waited for without end.
    """
    with open(path, "w", encoding="ascii") as lock:
        _take_lock(lock)
        yield


def _take_lock(lock: IO[str]) -> None:
    started_s = time.monotonic()
    is_told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited_s = time.monotonic() - started_s
        except OSError as error:  # a file system without locks
            logger.info("building without a lock: %s: %s", lock.name, error.strerror)
            return
        else:
            return
        if waited_s >= _LOCK_TIMEOUT_S:
            logger.warning("%s has been locked for %.0f s: building without it", lock.name, waited_s)
            return
        if waited_s >= _TOLD_AFTER_S and not is_told:
            logger.info("another process builds the same, and is waited for: %s", lock.name)
            is_told = True
        time.sleep(_LOCK_LOOK_S)
