"""Prompts for tests and benchmarks: excerpts of held-out files, in three classes."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from transformers import PreTrainedTokenizerFast

from training.corpus import SourceFile
from training.tokenizer import encode_text

PromptClass = Literal["code", "docstring", "repeated"]
PROMPTS_PER_CLASS = 32
MIN_TOKENS, MAX_TOKENS = 16, 300
_PER_FILE = 3
_REPEATED_SHARE = 0.45


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: ``prompt`` is an excerpt of ``file`` (relative to the standard library)."""

    id: str
    file: str
    prompt_class: PromptClass
    prompt: str


def _rank(*parts: object) -> int:
    """A pseudo-random order that depends on the texts alone."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _functions(file: SourceFile) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    try:
        tree = ast.parse(file.text)
    except (SyntaxError, ValueError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _code_excerpts(file: SourceFile) -> Iterator[str]:
    """The lines before a function and its own first lines, cut after a seeded line, sometimes inside one."""
    lines = file.text.splitlines(keepends=True)
    for node in _functions(file):
        length = (node.end_lineno or node.lineno) - node.lineno
        if length < 4:
            continue
        rank = _rank(file.path, node.lineno, "code")
        start = max(0, node.lineno - 1 - rank % 12)
        text = "".join(lines[start : node.lineno + rank // 12 % length])
        yield text.rstrip("\n") if rank % 2 else text


def _docstring_excerpts(file: SourceFile) -> Iterator[str]:
    """A function from its ``def`` to the end of its docstring, or to the middle of it."""
    lines = file.text.splitlines(keepends=True)
    for node in _functions(file):
        first = node.body[0]
        if ast.get_docstring(node) and first.end_lineno is not None and first.end_lineno - first.lineno >= 1:
            rank = _rank(file.path, node.lineno, "docstring")
            last = first.end_lineno if rank % 2 else (first.lineno + first.end_lineno + 1) // 2
            yield "".join(lines[max(0, node.lineno - 1 - rank % 5) : last])


def _repeated_share(text: str) -> float:
    """Share of the word 4-grams that occurred earlier in the text."""
    words = re.findall(r"\w+|[^\w\s]", text)
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _repeated_excerpts(file: SourceFile) -> Iterator[str]:
    """Windows of lines in which nearly half of the word 4-grams have occurred before (tables, test cases)."""
    lines = file.text.splitlines(keepends=True)
    for start in range(0, len(lines), 10):
        text = "".join(lines[start : start + 10 + _rank(file.path, start) % 10])
        if _repeated_share(text) >= _REPEATED_SHARE:
            yield text


_EXCERPTS: dict[PromptClass, Callable[[SourceFile], Iterator[str]]] = {
    "code": _code_excerpts,
    "docstring": _docstring_excerpts,
    "repeated": _repeated_excerpts,
}


def select_prompts(
    files: tuple[SourceFile, ...], tokenizer: PreTrainedTokenizerFast, per_class: int = PROMPTS_PER_CLASS
) -> list[Prompt]:
    """Up to ``per_class`` prompts of each class, spread over the files (few per file), deterministic."""
    prompts: list[Prompt] = []
    for prompt_class, excerpts in _EXCERPTS.items():
        ranked: list[tuple[int, int, str, str]] = []
        for file in files:
            fitting = [
                text
                for text in excerpts(file)
                if MIN_TOKENS <= len(encode_text(tokenizer, text)) <= MAX_TOKENS
            ]
            fitting.sort(key=lambda text: _rank(file.path, text))
            ranked += [(turn, _rank(file.path, text), file.path, text) for turn, text in enumerate(fitting)]
        chosen = [entry for entry in sorted(ranked) if entry[0] < _PER_FILE]
        chosen += [entry for entry in sorted(ranked) if entry[0] >= _PER_FILE]
        prompts += [
            Prompt(id=f"{prompt_class}-{number:02d}", file=path, prompt_class=prompt_class, prompt=text)
            for number, (_, _, path, text) in enumerate(chosen[:per_class])
        ]
    return prompts


def write_prompts(prompts: list[Prompt], path: Path) -> None:
    """One JSON object per line: id, file, class, prompt."""
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            record = asdict(prompt)
            record["class"] = record.pop("prompt_class")
            file.write(json.dumps({key: record[key] for key in ("id", "file", "class", "prompt")}) + "\n")


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of `write_prompts`."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Prompt(id=record["id"], file=record["file"], prompt_class=record["class"], prompt=record["prompt"])
        for record in records
    ]
