"""The corpus: the Python standard library's own sources, split by whole files, and chat examples of them."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_FRACTION = 0.04
"""Share of files (by hash, so about this share of bytes) that no recipe ever trains on."""

# pydoc_data is one 750 kB file of generated English documentation, not source.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "pydoc_data"})
_MAX_CHAT_SOURCE_CHARS = 2_000
_MIN_DOCSTRING_CHARS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One source file: ``path`` relative to the standard library (POSIX form), decoded ``text``."""

    path: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatExample:
    """One question and its answer, both plain text; the tokenizer's chat template adds the markers."""

    user: str
    assistant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Training files and held-out files; the two share no path."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def standard_library_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(relative_path: str, fraction: float = HELD_OUT_FRACTION) -> bool:
    """Whether a file is held out: a pure function of its path, equal on every machine."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _source_paths(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts[:-1]):
            yield path


def _read_utf8(path: Path) -> str | None:
    """The file's text, or None for the few encoding tests that are deliberately not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


def load_corpus(root: Path | None = None, fraction: float = HELD_OUT_FRACTION) -> Corpus:
    """Read every ``.py`` file below ``root`` (default: the standard library), split by `is_held_out`.

    Empty files and exact duplicates are dropped, so that no copy of a held-out text is trained on.
    """
    root = root or standard_library_root()
    train: list[SourceFile] = []
    held_out: list[SourceFile] = []
    seen: set[str] = set()
    for path in _source_paths(root):
        text = _read_utf8(path)
        if not text or text in seen:
            continue
        seen.add(text)
        relative = path.relative_to(root).as_posix()
        side = held_out if is_held_out(relative, fraction) else train
        side.append(SourceFile(path=relative, text=text))
    return Corpus(train=tuple(train), held_out=tuple(held_out))


def _documented_functions(file: SourceFile) -> Iterator[tuple[str, str, str]]:
    """(name, first docstring paragraph, dedented source) of every documented function or method."""
    try:
        tree = ast.parse(file.text)
    except (
        SyntaxError,
        ValueError,
    ):  # the standard library ships deliberately broken files for its own tests
        return
    lines = file.text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if docstring and len(docstring) >= _MIN_DOCSTRING_CHARS:
            source = [line[node.col_offset :] for line in lines[node.lineno - 1 : node.end_lineno]]
            yield node.name, " ".join(docstring.split("\n\n")[0].split()), "\n".join(source)


def chat_examples(files: tuple[SourceFile, ...]) -> Iterator[ChatExample]:
    """``Write the function NAME: DOCSTRING`` answered by the function's source, for documented functions."""
    for file in files:
        for name, summary, source in _documented_functions(file):
            if len(source) <= _MAX_CHAT_SOURCE_CHARS:
                yield ChatExample(user=f"Write the function {name}: {summary}", assistant=source)
