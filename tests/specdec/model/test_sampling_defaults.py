"""What a checkpoint says of sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.core.errors import CheckpointError
from specdec.core.sampling_params import SamplingDefaults, SamplingParams
from specdec.model.sampling_defaults import sampling_defaults_of


def folder_with(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    return folder


def test_a_published_file(tmp_path: Path) -> None:
    """Qwen2.5-1.5B-Instruct's, but for the ids."""
    content = {
        "bos_token_id": 1,
        "eos_token_id": [2, 1],
        "do_sample": True,
        "repetition_penalty": 1.1,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "transformers_version": "4.37.0",
    }
    defaults = sampling_defaults_of(folder_with(tmp_path, content))
    assert defaults == SamplingDefaults(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1)
    assert defaults.params() == SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1)


@pytest.mark.parametrize("content", [{}, {"top_k": 0}, {"top_k": -1, "temperature": None}])
def test_what_is_not_said_is_as_ever(tmp_path: Path, content: dict[str, Any]) -> None:
    assert sampling_defaults_of(folder_with(tmp_path, content)) == SamplingDefaults()


def test_without_a_file(tmp_path: Path) -> None:
    assert sampling_defaults_of(tmp_path).params() == SamplingParams()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"temperature": 1e-6}, SamplingDefaults(temperature=0.0)),
        ({"temperature": 1}, SamplingDefaults(temperature=1.0)),
        ({"top_k": 50.0}, SamplingDefaults(top_k=50)),
    ],
)
def test_other_spellings(tmp_path: Path, content: dict[str, Any], expected: SamplingDefaults) -> None:
    assert sampling_defaults_of(folder_with(tmp_path, content)) == expected


def test_what_a_request_says_goes_before_it(tmp_path: Path) -> None:
    defaults = sampling_defaults_of(folder_with(tmp_path, {"temperature": 0.7, "top_k": 20}))
    assert defaults.params(temperature=0.0, max_tokens=5) == SamplingParams(
        temperature=0.0, top_k=20, max_tokens=5
    )
    assert defaults.params(top_k=None).top_k is None


@pytest.mark.parametrize("content", ["[1]", "{", "7"])
def test_what_is_no_json_object_is_an_error(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json (cannot be read|must hold a JSON)"):
        sampling_defaults_of(folder_with(tmp_path, content))


def test_a_byte_order_mark(tmp_path: Path) -> None:
    content = "\ufeff" + json.dumps({"top_p": 0.5})
    assert sampling_defaults_of(folder_with(tmp_path, content)) == SamplingDefaults(top_p=0.5)


@pytest.mark.parametrize(
    "content",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": True},
        {"top_p": 2.0},
        {"top_p": 0},
        {"top_k": 5.5},
        {"repetition_penalty": 0},
        '{"min_p": NaN}',
    ],
)
def test_what_cannot_be_sampled_with_is_left_aside(
    tmp_path: Path, content: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning: nobody may have asked for it, and the model can be served without."""
    (name,) = content if isinstance(content, dict) else ("min_p",)
    folder = folder_with(tmp_path, content)
    assert sampling_defaults_of(folder) == SamplingDefaults()
    assert str(folder / "generation_config.json") in caplog.text
    assert f"do not say {name} " in caplog.text
