"""Loading tokenizers, and the errors that say where two of them differ."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from specdec.core.errors import CheckpointError
from specdec.model.tokenizer import CLASSES_STATED, check_same_tokenizer, load_tokenizer
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


STATED = [(family, name) for family, names in CLASSES_STATED.items() for name in names]


def save_as(folder: Path, family: str, class_name: str | None, **more: Any) -> Path:
    """Save the tiny tokenizer with files that state this model type and tokenizer class."""
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": class_name, **more}))
    return folder


@pytest.mark.parametrize(("family", "class_name"), STATED)
def test_what_files_state_is_what_transformers_would_find_out(
    tmp_path: Path, family: str, class_name: str
) -> None:
    folder = save_as(tmp_path, family, class_name)
    ours: Any = load_tokenizer(folder)
    theirs: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template


LOADS = """
import sys
from pathlib import Path
from specdec.model.tokenizer import load_tokenizer
load_tokenizer(Path(sys.argv[1]))
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("family", "class_name", "more", "needs_torch"),
    [
        ("llama", "PreTrainedTokenizerFast", {}, False),
        ("qwen3", "Qwen2Tokenizer", {}, False),
        # What `AutoTokenizer` would not take at its word, it is asked about.
        ("qwen2", "PreTrainedTokenizerFast", {}, True),
        ("llama", "LlamaTokenizer", {}, True),
        ("llama", None, {}, True),
        ("llama", "PreTrainedTokenizerFast", {"auto_map": {"AutoTokenizer": [None, "own.Own"]}}, True),
    ],
)
def test_who_states_all_is_loaded_without_pytorch(
    tmp_path: Path, family: str, class_name: str | None, more: dict[str, Any], needs_torch: bool
) -> None:
    folder = save_as(tmp_path, family, class_name, **more)
    command = [sys.executable, "-c", LOADS, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == str(needs_torch), ran.stderr


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [None, "{", "[]", '"text"'])
def test_files_that_state_nothing(tmp_path: Path, file: str, content: str | None) -> None:
    folder = save_as(tmp_path, "llama", "PreTrainedTokenizerFast")
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    if content is None:
        assert len(load_tokenizer(folder)) == VOCAB_SIZE
    else:
        with pytest.raises(CheckpointError, match="has no tokenizer that can be loaded"):
            load_tokenizer(folder)


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
