"""Building and caching C++ libraries, with a source small enough to build in a moment."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.attention import native
from specdec.attention.native import NativeUnavailable, load_library

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


def built(cache_dir: Path) -> list[Path]:
    return sorted(cache_dir.glob("*.so"))


def test_a_second_start_builds_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_dir = tmp_path / "cache"
    assert load(source, cache_dir).answer() == 41
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("built again"))
    assert load(source, cache_dir).answer() == 41
    assert [path.suffix for path in sorted(cache_dir.iterdir())] == [".lock", ".sha256", ".so"]


def test_a_changed_source_is_built_beside_the_old(source: Path, tmp_path: Path) -> None:
    cache_dir = tmp_path / "cache"
    load(source, cache_dir)
    source.write_text(SOURCE.format(42), encoding="ascii")
    assert load(source, cache_dir).answer() == 42
    assert len(built(cache_dir)) == 2


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "no digest", "garbled digest"])
def test_a_damaged_library_is_built_again(source: Path, tmp_path: Path, damage: str) -> None:
    # Not the folder of a library that this process has loaded: that file must not change under it.
    cache_dir, copy = tmp_path / "cache", tmp_path / "copy"
    load(source, cache_dir)
    copy.mkdir()
    for path in cache_dir.iterdir():
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
