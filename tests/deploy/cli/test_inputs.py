"""Options that change what a file says are checked as the file is."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.cli.inputs import engine_config
from specdec.core.errors import ConfigError
from specdec.engine.config import EngineConfig


def configured(folder: Path, speculative: str, num_speculative_tokens: int | None) -> EngineConfig:
    file = folder / "config.yaml"
    file.write_text(f"target: {{model: {folder}}}\nspeculative_config: {speculative}\n")
    return engine_config(file, None, None, None, num_speculative_tokens, file)


SELF = "{method: self, num_speculative_tokens: 4, kv: {policy: streaming, budget: 16, sink_tokens: 4}}"


@pytest.mark.parametrize(("asked", "k"), [(None, 4), (7, 7), (12, 12)])
def test_the_number_of_draft_tokens_is_what_was_asked_for(tmp_path: Path, asked: int | None, k: int) -> None:
    speculative = configured(tmp_path, SELF, asked).speculative_config
    assert speculative.num_speculative_tokens == k
    written = SELF.replace("tokens: 4", f"tokens: {k}", 1)
    assert speculative == configured(tmp_path, written, None).speculative_config


def test_more_draft_tokens_than_the_budget_holds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"-k 13: kv.budget: 16 tokens do not hold .* give at least 17"):
        configured(tmp_path, SELF, 13)
    assert configured(tmp_path, SELF, 0).speculative_config.method == "none"


@pytest.mark.parametrize(
    "speculative",
    [
        "{method: ngram, prompt_lookup_max: 3}",
        "{method: draft_model, model: there, rejection_sample_method: rejection, draft_top_k: 9}",
        "{method: draft_model, model: there, rejection_sample_method: typical, allow_lossy: true}",
        "{method: draft_model, model: there, overlap: draft_ahead, cache: {num_blocks: 9}, fallback: ngram}",
        '{method: self, kv: {policy: streaming, budget: "5%"}}',
        "{method: ngram, num_speculative_tokens_per_batch_size: [[1, 4, 3]]}",
    ],
)
def test_nothing_else_changes(tmp_path: Path, speculative: str) -> None:
    before = configured(tmp_path, speculative, None).speculative_config
    after = configured(tmp_path, speculative, 2).speculative_config
    assert after == before.model_copy(update={"num_speculative_tokens": 2})
