"""Tokenised corpus, cached in a work folder: the documents that recipes train on and the held-out ones."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from training.checkpointing import replace_file
from training.corpus import Corpus
from training.tokenizer import encode_chats, encode_files

CHAT_SHARE = 0.3
"""Share of the derived chat examples that is trained on (about 4 % of the tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedCorpus:
    """uint16 arrays, one per document, without separators."""

    train: list[np.ndarray]
    """Files, then chat examples."""
    held_out: list[np.ndarray]
    """Files in the order of ``Corpus.held_out``."""


def _fingerprint(tokenizer: PreTrainedTokenizerFast, corpus: Corpus) -> str:
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    for file in (*corpus.train, *corpus.held_out):
        digest.update(f"{file.path}\0{len(file.text)}\0".encode())
    return digest.hexdigest()[:16]


def tokenize_corpus(
    tokenizer: PreTrainedTokenizerFast, corpus: Corpus, cache_folder: Path
) -> TokenizedCorpus:
    """Encode files and chat examples once per (tokenizer, corpus)."""
    cache = cache_folder / f"tokens-{_fingerprint(tokenizer, corpus)}.npz"
    if not cache.exists():
        chats = encode_chats(tokenizer, corpus.train)
        kept = [chat for i, chat in enumerate(chats) if (i + 1) * CHAT_SHARE % 1 < CHAT_SHARE]
        _save(cache, encode_files(tokenizer, corpus.train) + kept, encode_files(tokenizer, corpus.held_out))
    with np.load(cache) as saved:
        return TokenizedCorpus(
            train=np.split(saved["train"], saved["train_ends"][:-1]),
            held_out=np.split(saved["held_out"], saved["held_out_ends"][:-1]),
        )


def _save(path: Path, train: list[np.ndarray], held_out: list[np.ndarray]) -> None:
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # to a name numpy would add its suffix
            np.savez(
                file,
                train=np.concatenate(train),
                train_ends=np.cumsum([len(document) for document in train]),
                held_out=np.concatenate(held_out),
                held_out_ends=np.cumsum([len(document) for document in held_out]),
            )

    replace_file(path, write)
