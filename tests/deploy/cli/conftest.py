"""Tiny model folders and a configuration over them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architectures import make_tokenizer, save_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, `draft` (same weights) and `foreign` (another tokenizer)."""
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "target", seed=1)
    save_model(folder / "draft", seed=1)
    save_model(folder / "foreign", seed=2)
    other = make_tokenizer()
    other.add_tokens(["new"])
    other.save_pretrained(folder / "foreign")
    return folder


@pytest.fixture
def config(models: Path, tmp_path: Path) -> Path:
    """A configuration that works."""
    file = tmp_path / "config.yaml"
    file.write_text(
        f"""\
target:
  {{model: {models}/target, dtype: float32, device: cpu, num_threads: 1, compile: {{mode: "off"}}}}
speculative_config:
  method: draft_model
  model: {models}/draft
  num_speculative_tokens: 3
  controller: fixed
  num_threads: 1
  compile: {{mode: "off"}}
cache: {{num_blocks: 64}}
"""
    )
    return file


@pytest.fixture(autouse=True)
def _threads_as_before(threads_as_before: None) -> None:
    """The configuration sets the thread count of the whole process."""
