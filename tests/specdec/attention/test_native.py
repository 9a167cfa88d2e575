"""Building and caching C++ libraries, with a source small enough to build in a moment."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.attention import native
from specdec.attention.native import NativeUnavailable, load_library
from specdec.core.errors import ConfigError
from specdec.scheduling.speculation.cost_profile import ProfileStore

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer() {{ return {}; }}\n'


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    try:
        native.find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    path = folder / "answer.cpp"
    path.write_text(SOURCE.format(41), encoding="ascii")
    return path


def load(source: Path, cache_dir: Path) -> ctypes.CDLL:
    load_library.cache_clear()
    return load_library(source, cache_dir)


@pytest.fixture
def filled(source: Path, tmp_path: Path) -> Path:
    """A cache with the library in it."""
    cache_dir = tmp_path / "cache"
    load(source, cache_dir)
    return cache_dir


def built(cache_dir: Path) -> list[Path]:
    return sorted(cache_dir.glob("*.so"))


def compiler_that(folder: Path, version: str, command: str = 'exec g++ "$@"') -> str:
    """A compiler that says it is `version`."""
    script = folder / f"compiler-{len(list(folder.iterdir()))}"
    script.write_text(
        f"#!/bin/sh\nif [ \"$1\" = --version ]; then echo '{version}'; exit; fi\n{command}\n",
        encoding="ascii",
    )
    script.chmod(0o755)
    return str(script)


def test_a_second_start_builds_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_dir = tmp_path / "cache"
    assert load(source, cache_dir).answer() == 41
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("built again"))
    assert load(source, cache_dir).answer() == 41
    assert [path.suffix for path in sorted(cache_dir.iterdir())] == [".lock", ".sha256", ".so"]


def test_a_changed_source_is_built_beside_the_old(filled: Path, source: Path) -> None:
    source.write_text(SOURCE.format(42), encoding="ascii")
    assert load(source, filled).answer() == 42
    assert len(built(filled)) == 2


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "no digest", "garbled digest"])
def test_a_damaged_library_is_built_again(filled: Path, source: Path, tmp_path: Path, damage: str) -> None:
    # Not the folder of a library that this process has loaded: that file must not change under it.
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in filled.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (library,) = built(copy)
    digest = library.with_suffix(".sha256")
    if damage == "truncated":
        library.write_bytes(library.read_bytes()[:2000])
    elif damage == "overwritten":
        library.write_bytes(b"\0" * library.stat().st_size)
    elif damage == "no digest":
        digest.unlink()
    else:
        digest.write_bytes(b"\xff\xfe")
    assert load(source, copy).answer() == 41
    assert digest.read_text(encoding="ascii") != ""
    assert len(built(copy)) == 1


def test_processes_may_build_at_the_same_time(source: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from specdec.attention.native import load_library;"
        "sys.exit(load_library(Path(sys.argv[1]), Path(sys.argv[2])).answer() - 41)"
    )
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "cache")]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert len(built(tmp_path / "cache")) == 1


def test_a_failed_build_quotes_the_compiler(source: Path, tmp_path: Path) -> None:
    source.write_text("this is not C++", encoding="ascii")
    with pytest.raises(NativeUnavailable, match=r"failed:.*error"):
        load(source, tmp_path / "cache")
    assert built(tmp_path / "cache") == []


def test_a_cache_folder_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="ascii")
    with pytest.raises(NativeUnavailable, match=r"cannot write the kernel cache .*file"):
        load(source, blocked / "cache")


def test_a_filled_cache_needs_no_compiler(
    filled: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load(source, filled).answer() == 41
    source.write_text(SOURCE.format(42), encoding="ascii")
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler found \(CXX=no-such-compiler\)"):
        load(source, filled)  # that of other sources is none


def test_without_a_compiler_what_is_damaged_is_not_loaded(
    filled: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(filled, copy)
    (library,) = built(copy)
    library.write_bytes(library.read_bytes()[:-1])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler found"):
        load(source, copy)
    assert built(copy) == [library]


def test_a_filled_cache_is_loaded_without_a_lock(
    filled: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write to any folder, so that permissions would show nothing here."""
    monkeypatch.setattr(native, "_locked", lambda path: pytest.fail("locked"))
    assert load(source, filled).answer() == 41


def test_a_lock_that_is_held_for_ever_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_LOCK_TIMEOUT_S", 0.3)
    lock = tmp_path / "kernel.lock"
    with open(lock, "w", encoding="ascii") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with native._locked(lock):
            pass
    assert "building without it" in caplog.text
    caplog.clear()
    with native._locked(lock), open(lock, "w", encoding="ascii") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not caplog.text


def test_a_file_system_without_locks_keeps_nobody_from_building(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(lock: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(native.fcntl, "flock", no_locks)
    with native._locked(tmp_path / "kernel.lock"):
        pass


def test_where_none_can_be_built_another_compilers_library_will_do(
    filled: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler_that(tmp_path, "g++ 99"))
    assert load(source, filled).answer() == 41
    assert len(built(filled)) == 2, "another compiler builds its own"

    def read_only(path: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(native, "_locked", read_only)
    monkeypatch.setenv("CXX", compiler_that(tmp_path, "g++ 100"))
    assert load(source, filled).answer() == 41
    assert len(built(filled)) == 2


def test_clang_is_refused_by_name(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its OpenMP wants libomp; what it makes could not be loaded beside PyTorch's libgomp."""
    monkeypatch.setattr(native, "_openmp_library", lambda: Path("libgomp.so.1"))
    monkeypatch.setenv("CXX", compiler_that(tmp_path, "Debian clang version 14.0.6"))
    with pytest.raises(NativeUnavailable, match=r"compiler-\d+ is clang, .*libgomp.*; install g\+\+"):
        load(source, tmp_path / "cache")
    monkeypatch.setattr(native, "_openmp_library", lambda: None)
    assert native.find_compiler().startswith(str(tmp_path))


def test_what_cannot_be_loaded_is_not_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir = tmp_path / "cache"
    good = source.read_text(encoding="ascii")
    source.write_text('extern "C" int nowhere(); int used = nowhere();\n' + good, encoding="ascii")
    with pytest.raises(NativeUnavailable, match=r"cannot load .*nowhere"):
        load(source, cache_dir)
    assert built(cache_dir) == []


def test_what_may_not_be_run_where_it_lies_is_built_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that is mounted without that."""
    cache_dir = tmp_path / "cache"

    def cannot_map(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr("ctypes.CDLL", cannot_map)
    for _ in range(2):
        with pytest.raises(NativeUnavailable, match=r"set compile\.cache_dir to a folder that programs may"):
            load(source, cache_dir)
        (library,) = built(cache_dir)
        monkeypatch.setenv("CXX", "no-such-compiler")
    assert library.exists()


def test_who_has_no_home_is_told_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        if str(path).startswith("~"):
            raise RuntimeError("Could not determine home directory.")
        return path

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(ConfigError, match=r"compile\.cache_dir: Could not .*: give a folder, or set HOME"):
        native.resolve_cache_dir(None)
    assert native.resolve_cache_dir(tmp_path) == tmp_path
    with pytest.raises(ConfigError, match=r"profile_dir: Could not .*: give a folder, or set HOME"):
        ProfileStore()


def test_a_filled_cache_is_kept_where_nothing_could_replace_it(
    filled: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (library,) = built(filled)
    monkeypatch.setenv("CXX", "no-such-compiler")

    def cannot_map(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr("ctypes.CDLL", cannot_map)
    with pytest.raises(NativeUnavailable, match=r"cannot load .*failed to map"):
        load(source, filled)
    assert built(filled) == [library]


def test_a_compiler_that_cannot_be_run_says_so(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(NativeUnavailable, match=r"broken cannot be run: .*"):
        load(source, tmp_path / "cache")


@pytest.mark.parametrize(
    ("words", "message"), [(r"\344 \244", r"failed: \S+ \S+$"), ("", r"failed: exit status 3$")]
)
def test_a_compiler_that_does_not_speak_utf_8_is_quoted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    compiler = tmp_path / "foreign"
    compiler.write_text(f"#!/bin/sh\nprintf '{words}'\nprintf '{words}' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeUnavailable, match=message):
        load(source, tmp_path / "cache")
