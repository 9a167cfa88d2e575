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


def test_no_mass_at_all_is_the_most_likely_token(tmp_path: Path) -> None:
    assert sampling_defaults_of(folder_with(tmp_path, {"top_p": 0})) == SamplingDefaults(top_k=1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2.0}, "top_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ([], "generation_config.json"),
        ("{", "generation_config.json"),
    ],
)
def test_what_cannot_be_sampled_with_is_named(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json") as caught:
        sampling_defaults_of(folder_with(tmp_path, content))
    assert said in str(caught.value)
