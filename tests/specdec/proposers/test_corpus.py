"""Which files of a folder are a corpus."""

from __future__ import annotations

from pathlib import Path

from specdec.proposers.corpus import Corpus, open_corpus
from specdec.proposers.lookup_config import RetrievalConfig
from tests.architectures import make_tokenizer


def test_hidden_files_and_folders_are_left_out(tmp_path: Path) -> None:
    """A folder that lies in a hidden one itself is read."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    folder = tmp_path / ".texts" / "corpus"
    for hidden in (folder / ".git" / "refs", folder / "deeper" / ".cache"):
        hidden.mkdir(parents=True)
        (hidden / "head").write_text("not to be found")
        (hidden.parent / ".index").write_bytes(b"DIRC\x00\xff\xfe")
    (folder / ".git" / "index").write_bytes(b"DIRC\x00\xff\xfe")
    (folder / "one.txt").write_text("hello world")
    (folder / "deeper" / "two.txt").write_text("hello again")
    config = RetrievalConfig(path=str(folder), cache_dir=str(tmp_path / "kept"))
    found = open_corpus(config, str(tmp_path / "model"))
    texts = [
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("hello again", "hello world")
    ]
    assert found.token_ids.tolist() == Corpus.of_texts(texts).token_ids.tolist()
