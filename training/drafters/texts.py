"""Texts to train on, from files: one document per text file, one per line of JSON lines."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from specdec.core.errors import ConfigError
from specdec.core.files import is_hidden
from training.progress import console

logger = logging.getLogger(__name__)

_LINE_SUFFIXES = (".jsonl", ".ndjson")
_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", *_LINE_SUFFIXES)
HELD_OUT_SHARE = 0.05
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
"""Roles of a chat template by what ShareGPT's `from` says."""


def read_documents(
    paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase, *, leaving_out: Sequence[Path] = ()
) -> list[np.ndarray]:
    """Token ids int64 of every document of ``paths`` (files, or folders of them), in a fixed order.

    Without what the tokenizer begins every text with (`leading_ids`), which chat templates write, too.
    A line of JSON lines has a ``text``, a ``prompt`` (and ``completion``), ``messages`` (chat template), or
    ``conversations`` as ShareGPT and SpecForge write them; these two may have a ``system`` beside them.
    Documents of fewer than two tokens, empty conversations among them, are left out; their number is logged.
    Folders of ``leaving_out`` inside others are not read: what a run writes would be other data when it goes
    on.

    Raises:
        ConfigError: a file or line is not what it should be, or there is no text at all.
    """
    files = list(_files(paths, [folder.resolve() for folder in leaving_out]))
    documents: list[np.ndarray] = []
    num_left_out = 0
    lead = leading_ids(tokenizer)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("reading texts", total=sum(file.stat().st_size for file in files))
        for file in files:
            for ids, num_characters in _encoded(file, tokenizer):
                if lead and tuple(ids[: len(lead)]) == lead:
                    ids = ids[len(lead) :]
                if len(ids) > 1:
                    documents.append(np.asarray(ids, dtype=np.int64))
                else:
                    num_left_out += 1
                progress.advance(task, num_characters)
    if not documents:
        raise ConfigError(
            f"--data: no text in {', '.join(map(str, paths)) or 'nothing'} (of folders, files that end in "
            f"{', '.join(_TEXT_SUFFIXES)} are read)"
        )
    if num_left_out:
        logger.warning(
            "--data: %d of %d documents have fewer than two tokens, and are left out",
            num_left_out,
            len(documents) + num_left_out,
        )
    return documents


def leading_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return what the tokenizer itself puts before a text, as servers have it do: a BOS, or nothing."""
    plain: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    places = range(len(whole) - len(plain) + 1)
    start = next((place for place in places if whole[place : place + len(plain)] == plain), 0)
    return tuple(whole[:start])


def is_held_out(document: np.ndarray, share: float = HELD_OUT_SHARE) -> bool:
    """Whether a document is kept for evaluation: a pure function of its tokens."""
    digest = hashlib.sha256(document.tobytes()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def split(documents: Iterable[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(to train on, held out); of a single document its end is held out, of all copies that there are."""
    all_documents = list(documents)
    train = [document for document in all_documents if not is_held_out(document)]
    held_out = [document for document in all_documents if is_held_out(document)]
    if train and held_out:
        return train, held_out
    longest = max(range(len(all_documents)), key=lambda index: len(all_documents[index]))
    document = all_documents[longest]
    cut = len(document) - max(1, round(HELD_OUT_SHARE * len(document)))
    others = [
        other[:cut] if np.array_equal(other, document) else other
        for index, other in enumerate(all_documents)
        if index != longest
    ]
    return [*others, document[:cut]], [document[cut:]]


def _files(paths: Sequence[Path], leaving_out: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            whole = path.resolve()
            inside = [folder for folder in leaving_out if folder != whole and folder.is_relative_to(whole)]
            yield from (
                file
                for file in sorted(path.rglob("*"))
                if file.suffix.lower() in _TEXT_SUFFIXES
                and file.is_file()
                and not is_hidden(file, path)
                and not any(file.resolve().is_relative_to(folder) for folder in inside)
            )
        elif path.is_file():
            if path.suffix.lower() == ".json":
                raise ConfigError(
                    f"--data: {path} is one value of JSON; what is read is lines of JSON, an object for each "
                    "document (.jsonl), or texts: rename it to .txt to train on the JSON itself"
                )
            yield path
        else:
            raise ConfigError(f"--data: {path} does not exist")


def _encoded(file: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], int]]:
    """Token ids of each document of a file, and how many characters of it they are."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--data: {file} is not UTF-8: {error}") from error
    if file.suffix.lower() not in _LINE_SUFFIXES:
        yield _ids(tokenizer, text, str(file)), len(text)
        return
    # Strings of JSON may hold U+2028 and the like, at which `splitlines` would cut.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _line(f"{file}:{number}", line, tokenizer), len(line)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, where: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can escape them one by one; no text in UTF-8 has such.
        raise ConfigError(f"--data: {where} has half of a surrogate pair: {error}") from error
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _line(where: str, line: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # not only what is no JSON: numbers of 5,000 digits too
        raise ConfigError(f"--data: {where} is not JSON: {error}") from error
    if isinstance(entry, dict):
        if isinstance(entry.get("text"), str):
            return _ids(tokenizer, entry["text"], where)
        completion = "" if entry.get("completion") is None else entry["completion"]
        if isinstance(entry.get("prompt"), str) and isinstance(completion, str):
            return _ids(tokenizer, entry["prompt"] + completion, where)
        if isinstance(entry.get("messages"), list):
            return _chat(where, [*_system(where, entry), *entry["messages"]], tokenizer)
        if isinstance(entry.get("conversations"), list):
            turns = enumerate(entry["conversations"])
            messages = [_message(f"{where}: conversations[{place}]", turn) for place, turn in turns]
            return _chat(where, [*_system(where, entry), *messages], tokenizer)
    raise ConfigError(
        f'--data: {where} must be an object with "text", "prompt" (and "completion"), all strings, '
        'or "messages", or "conversations"'
    )


def _chat(where: str, messages: list[Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if tokenizer.chat_template is None:
        raise ConfigError(f"--data: {where} has messages, the target has no chat template")
    if not messages:  # of data sets that were filtered turn by turn; templates take the first for granted
        return []
    try:
        return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    except Exception as error:  # a template is code, and raises what it likes
        raise ConfigError(
            f"--data: {where}: the target's chat template does not take these messages: "
            f"{str(error) or type(error).__name__}"
        ) from error


def _system(where: str, entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the instructions that some data sets have beside a conversation, as its first message."""
    given = entry.get("system")
    if given is None or given == "" or not (entry.get("messages") or entry.get("conversations")):
        return []
    if not isinstance(given, str):
        raise ConfigError(f'--data: {where}: "system" must be a string')
    return [{"role": "system", "content": given}]


def _message(where: str, turn: Any) -> dict[str, Any]:
    """Return a turn of `conversations` as a message: it is one already, or has ShareGPT's keys."""
    if isinstance(turn, dict) and "role" in turn and "content" in turn:
        return turn
    if not isinstance(turn, dict) or "from" not in turn or not isinstance(turn.get("value"), str):
        raise ConfigError(
            f'--data: {where} must be an object with "from" and "value" (a string), or "role" and "content"'
        )
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in _SPEAKERS:
        raise ConfigError(f"--data: {where}.from is {speaker!r}; known are {', '.join(_SPEAKERS)}")
    return {"role": _SPEAKERS[speaker], "content": turn["value"]}
