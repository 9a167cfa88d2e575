"""The tokenised corpus in its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.corpus import Corpus, SourceFile
from training.datasets import tokenize_corpus
from training.tokenizer import encode_text, train_tokenizer

TEXTS = [f'def f{number}(x):\n    """Return what comes of it."""\n    return x\n' for number in range(4)]
CORPUS = Corpus(
    train=tuple(SourceFile(path=f"{number}.py", text=text) for number, text in enumerate(TEXTS[:3])),
    held_out=(SourceFile(path="3.py", text=TEXTS[3]),),
)


def test_a_cache_that_was_cut_off_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer(TEXTS * 50)
    whole = np.savez

    def cut(file: Any, **arrays: Any) -> None:
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", cut)
    with pytest.raises(KeyboardInterrupt):
        tokenize_corpus(tokenizer, CORPUS, tmp_path / "work")
    monkeypatch.setattr(np, "savez", whole)
    made = tokenize_corpus(tokenizer, CORPUS, tmp_path / "work")
    assert made.held_out[0].tolist() == encode_text(tokenizer, TEXTS[3])
    assert [file.suffix for file in (tmp_path / "work").iterdir()] == [".npz"]
    monkeypatch.setattr(np, "savez", cut)
    read = tokenize_corpus(tokenizer, CORPUS, tmp_path / "work")
    for ours, theirs in ((made.train, read.train), (made.held_out, read.held_out)):
        assert [one.tolist() for one in ours] == [one.tolist() for one in theirs]
