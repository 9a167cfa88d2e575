"""Texts to train on, from files: one document per text file, one per line of JSON lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from specdec.core.errors import ConfigError
from specdec.core.files import is_hidden

_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
HELD_OUT_SHARE = 0.05


def read_documents(paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Token ids int64 of every document of ``paths`` (files, or folders of them), in a fixed order.

    A line of JSON lines has a ``text``, a ``prompt`` (and ``completion``), or ``messages`` (chat template).

    Raises:
        ConfigError: a file or line is not what it should be, or there is no text at all.
    """
    documents = [
        np.asarray(ids, dtype=np.int64)
        for file in _files(paths)
        for ids in _encoded(file, tokenizer)
        if len(ids) > 1
    ]
    if not documents:
        raise ConfigError(f"--data: no text in {', '.join(map(str, paths)) or 'nothing'}")
    return documents


def is_held_out(document: np.ndarray, share: float = HELD_OUT_SHARE) -> bool:
    """Whether a document is kept for evaluation: a pure function of its tokens."""
    digest = hashlib.sha256(document.tobytes()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def split(documents: Iterable[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(to train on, held out); of a single document its end is held out."""
    all_documents = list(documents)
    train = [document for document in all_documents if not is_held_out(document)]
    held_out = [document for document in all_documents if is_held_out(document)]
    if train and held_out:
        return train, held_out
    longest = max(range(len(all_documents)), key=lambda index: len(all_documents[index]))
    document = all_documents[longest]
    cut = len(document) - max(1, round(HELD_OUT_SHARE * len(document)))
    others = [other for index, other in enumerate(all_documents) if index != longest]
    return [*others, document[:cut]], [document[cut:]]


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from (
                file
                for file in sorted(path.rglob("*"))
                if file.suffix in _TEXT_SUFFIXES and not is_hidden(file, path)
            )
        elif path.is_file():
            yield path
        else:
            raise ConfigError(f"--data: {path} does not exist")


def _encoded(file: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--data: {file} is not UTF-8: {error}") from error
    if file.suffix != ".jsonl":
        yield _ids(tokenizer, text)
        return
    # Strings of JSON may hold U+2028 and the like, at which `splitlines` would cut.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _line(file, number, line, tokenizer)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _line(file: Path, number: int, line: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--data: {file}:{number} is not JSON: {error}") from error
    if isinstance(entry, dict):
        if isinstance(entry.get("text"), str):
            return _ids(tokenizer, entry["text"])
        completion = "" if entry.get("completion") is None else entry["completion"]
        if isinstance(entry.get("prompt"), str) and isinstance(completion, str):
            return _ids(tokenizer, entry["prompt"] + completion)
        if isinstance(entry.get("messages"), list):
            if tokenizer.chat_template is None:
                raise ConfigError(f"--data: {file}:{number} has messages, the target has no chat template")
            try:
                return list(
                    tokenizer.apply_chat_template(entry["messages"], tokenize=True, return_dict=False)
                )
            except Exception as error:  # a template is code, and raises what it likes
                raise ConfigError(
                    f"--data: {file}:{number}: the target's chat template does not take these messages: "
                    f"{str(error) or type(error).__name__}"
                ) from error
    raise ConfigError(
        f'--data: {file}:{number} must be an object with "text", "prompt" (and "completion"), all strings, '
        'or "messages"'
    )
