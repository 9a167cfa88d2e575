"""Loading tokenizers, and the errors that say where two of them differ."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from specdec.core.errors import CheckpointError
from specdec.model.tokenizer import check_same_tokenizer, load_tokenizer
from tests.architectures import VOCAB_SIZE, make_tokenizer


def save_tokenizer(folder: Path, **changes: Any) -> Path:
    tokenizer = make_tokenizer(changes.pop("vocab_size", VOCAB_SIZE))
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_tiny_tokenizer_survives_a_round_trip(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path))
    assert tokenizer.decode(tokenizer.encode("hello, there")) == "hello, there"


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "folder")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer that can be loaded"):
        load_tokenizer(folder)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_tokenizer(tmp_path / "nowhere")


def save_sentencepiece(folder: Path) -> sentencepiece.SentencePieceProcessor:
    """Save a tokenizer as the first Llamas have it, without tokenizer.json, and return it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog", "hello, there"]),
        model_writer=model,
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        minloglevel=2,
    )
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def test_a_tokenizer_of_sentencepiece_alone(tmp_path: Path) -> None:
    own = save_sentencepiece(tmp_path / "folder")
    tokenizer = load_tokenizer(tmp_path / "folder")
    assert len(tokenizer) == 300
    assert tokenizer.encode("hello, fox", add_special_tokens=False) == own.encode("hello, fox")


def test_without_its_package_it_is_said_how_to_get_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_sentencepiece(tmp_path / "folder")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.model alone .*pip install -e '\.\[sentencepiece\]'"
    ):
        load_tokenizer(tmp_path / "folder")


def test_equal_tokenizers_pass_silently(tmp_path: Path) -> None:
    target, draft = save_tokenizer(tmp_path / "target"), save_tokenizer(tmp_path / "draft")
    assert check_same_tokenizer(target, draft) == ()


def test_the_first_different_token_is_named(tmp_path: Path) -> None:
    target, draft = save_tokenizer(tmp_path / "target"), save_tokenizer(tmp_path / "draft")
    file = draft / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="token id 35 is 'B' in the draft and 'A' in the target"):
        check_same_tokenizer(target, draft)


@pytest.mark.parametrize(("target_size", "draft_size"), [(VOCAB_SIZE, 120), (120, VOCAB_SIZE)])
def test_a_token_that_only_one_knows_is_a_difference(
    tmp_path: Path, target_size: int, draft_size: int
) -> None:
    target = save_tokenizer(tmp_path / "target", vocab_size=target_size)
    draft = save_tokenizer(tmp_path / "draft", vocab_size=draft_size)
    with pytest.raises(CheckpointError, match=r"token id 120 is .*absent in the"):
        check_same_tokenizer(target, draft)


def test_other_special_tokens_and_templates_are_warnings(tmp_path: Path) -> None:
    target = save_tokenizer(tmp_path / "target", chat_template="{{ messages }}", pad_token="<eos>")
    draft = save_tokenizer(tmp_path / "draft", chat_template="{{ message }}", pad_token="<bos>")
    special, template = check_same_tokenizer(target, draft)
    assert (
        special
        == "special token pad_token is '<bos>' in the draft model's tokenizer and '<eos>' in the target's"
    )
    assert template == "the chat templates of draft model and target differ from character 10 on"


TOKENIZER_CODE = """
from pathlib import Path

from transformers import PreTrainedTokenizerFast

Path({marker!r}).touch()


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def add_code(folder: Path, marker: Path) -> None:
    """Give a folder a tokenizer of its own, which leaves `marker` behind when it is loaded."""
    (folder / "own.py").write_text(TOKENIZER_CODE.format(marker=str(marker)))
    file = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))


@pytest.mark.parametrize("whose", ["target", "draft"])
def test_code_of_either_tokenizer_runs_only_when_asked_for(
    tmp_path: Path, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folders = {name: save_tokenizer(tmp_path / name) for name in ("target", "draft")}
    marker = tmp_path / "has run"
    add_code(folders[whose], marker)
    other = {"target": "draft", "draft": "target"}[whose]
    with pytest.raises(CheckpointError, match=f"{whose} has no tokenizer that can be loaded"):
        check_same_tokenizer(folders["target"], folders["draft"], **{f"trust_{other}_code": True})
    assert not marker.exists()
    trusted = {f"trust_{whose}_code": True}
    assert check_same_tokenizer(folders["target"], folders["draft"], **trusted) == ()
    assert marker.exists()
