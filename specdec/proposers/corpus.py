"""A corpus of texts that drafts are looked up in: read, tokenized and indexed once, then kept on disk.

What is kept is named by a digest of the tokenizer and of every file, so that it is never one of another
tokenizer or of older files; it is mapped into memory, not read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specdec.core.errors import ConfigError
from specdec.core.files import is_hidden
from specdec.core.proposal import MAX_DRAFT_TOKENS
from specdec.proposers.lookup_config import RetrievalConfig
from specdec.proposers.suffix_array import IntArray, sorted_suffixes
from specdec.proposers.suffix_automaton import NO_TOKEN

logger = logging.getLogger(__name__)

DEFAULT_CACHE_DIR = Path("~/.cache/drafthouse/retrieval")
_FORMAT = b"1"
_BATCH = 256
"""Texts that are tokenized at a time."""
_MOST_TOKENS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of all texts, each followed by `NO_TOKEN` (the last by many), and their suffixes in order."""

    token_ids: IntArray
    suffixes: IntArray

    @staticmethod
    def of_texts(texts: Iterable[Sequence[int]]) -> Corpus:
        """Index tokenized texts."""
        parts = [np.array([*text, NO_TOKEN], dtype=np.int32) for text in texts]
        ending = np.full(MAX_DRAFT_TOKENS, NO_TOKEN, dtype=np.int32)  # whatever follows can be read
        token_ids = np.concatenate([*parts, ending])
        return Corpus(token_ids, sorted_suffixes(token_ids))


def open_corpus(config: RetrievalConfig, model: str) -> Corpus:
    """Return the corpus that is configured, for the tokenizer of the model folder `model`.

    Raises:
        ConfigError: there is no such corpus, nothing in it, or a file that cannot be read; names it.
    """
    tokenizer_file, files = corpus_files(config, model)
    kept = Path(config.cache_dir or DEFAULT_CACHE_DIR).expanduser() / _digest(tokenizer_file, files, config)
    if (corpus := _load(kept)) is not None:
        return corpus
    logger.info("indexing the corpus %s (%d files); kept in %s", config.path, len(files), kept)
    corpus = Corpus.of_texts(_tokenized(tokenizer_file, files, config))
    if len(corpus.token_ids) > _MOST_TOKENS:
        raise ConfigError(f"speculative_config.retrieval.path: {config.path} has more than 2^31 tokens")
    if not (corpus.token_ids != NO_TOKEN).any():
        raise ConfigError(f"speculative_config.retrieval.path: there is no text in {config.path}")
    _keep(corpus, kept)
    return corpus


def corpus_files(config: RetrievalConfig, model: str) -> tuple[Path, list[Path]]:
    """Return the file of the tokenizer of the model folder `model`, and those of the corpus.

    Raises:
        ConfigError: one of them is missing; names it.
    """
    tokenizer_file = Path(model).expanduser() / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ConfigError(f"method retrieval tokenizes its corpus with {tokenizer_file}, which is missing")
    return tokenizer_file, _files_of(config)


def _files_of(config: RetrievalConfig) -> list[Path]:
    path = Path(config.path).expanduser()
    if path.is_dir():
        files = sorted(one for one in path.rglob("*") if one.is_file() and not is_hidden(one, path))
        if not files:
            raise ConfigError(f"speculative_config.retrieval.path: there is no file in the folder {path}")
        return files
    if not path.is_file():
        raise ConfigError(f"speculative_config.retrieval.path: there is no file or folder {path}")
    return [path]


def _digest(tokenizer_file: Path, files: Sequence[Path], config: RetrievalConfig) -> str:
    digest = hashlib.sha256(_FORMAT + config.text_field.encode())
    for path in (tokenizer_file, *files):
        with path.open("rb") as opened:
            digest.update(path.suffix.encode() + hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:32]


def _texts_of(path: Path, field: str) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as lines:
            if path.suffix != ".jsonl":
                yield lines.read()
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, field, f"{path}, line {number}")
    except UnicodeDecodeError as error:
        raise ConfigError(f"speculative_config.retrieval.path: {path} is not UTF-8 text: {error}") from error


def _text_of(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"speculative_config.retrieval.path: {where} is not JSON: {error}") from error
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(
            f"speculative_config.retrieval.path: {where} has no text in its field {field!r}: "
            "name the right one in retrieval.text_field"
        )
    return text


def _tokenized(tokenizer_file: Path, files: Sequence[Path], config: RetrievalConfig) -> Iterator[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for number, path in enumerate(files, 1):
        texts = list(_texts_of(path, config.text_field))
        for start in range(0, len(texts), _BATCH):
            for one in tokenizer.encode_batch(texts[start : start + _BATCH], add_special_tokens=False):
                yield one.ids
        logger.info("corpus: %d of %d files tokenized", number, len(files))


def _load(folder: Path) -> Corpus | None:
    try:
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("token_ids", "suffixes")]
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        logger.warning("the index of a corpus in %s cannot be read and is made anew: %s", folder, error)
        return None
    # Plain arrays over the mapped memory: slices of `memmap` cost several times as much.
    token_ids, suffixes = map(np.asarray, arrays)
    return Corpus(token_ids, suffixes)


def _keep(corpus: Corpus, folder: Path) -> None:
    """Write an index; it appears as a whole, and may be written by several processes.

    A folder that cannot be written to costs a line in the log, no more.
    """
    written: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        written = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".writing-"))
        np.save(written / "token_ids.npy", corpus.token_ids)
        np.save(written / "suffixes.npy", corpus.suffixes)
        shutil.rmtree(folder, ignore_errors=True)
        written.rename(folder)
    except OSError as error:
        logger.warning("the index of the corpus cannot be kept in %s: %s", folder, error)
        if written is not None:
            shutil.rmtree(written, ignore_errors=True)
