"""Options that change what a file says are checked as the file is; prompts are read as they were written."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from deploy.cli.inputs import engine_config, read_prompts
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


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_of_prompts_end_where_a_file_ends_them(tmp_path: Path, mark: bytes, end: str) -> None:
    """JSON may hold as they are what Unicode calls ends of lines, and not every tool escapes them."""
    given = ["a\u2028b", "c\u2029d\x85e", "\x0b\x0c\x1c", "two\nlines", "\U0001f600"]
    lines = [json.dumps({"prompt": one}, ensure_ascii=False) for one in given]
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(mark + "".join(f"{line}{end}" for line in [*lines, ""]).encode())
    assert read_prompts(file) == given
    text = tmp_path / "prompts.txt"
    text.write_bytes(mark + f"a\u2028b{end}{end}c".encode())
    assert read_prompts(text) == ["a\u2028b", "c"]


def test_a_json_document_is_no_file_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text('["a",\n"b"]\n')
    with pytest.raises(ConfigError, match=rf"--prompts: {file}: .*\.jsonl"):
        read_prompts(file)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        ('{"prompt": "\\ud83d"}', "is not JSON: .*surrogate|is not JSON: .*hex escape"),
        ('{"prompt": "\\ude00"}', "is not JSON"),
        ('{"text": "a"}', 'not a JSON object with a "prompt"'),
        ("[]", 'not a JSON object with a "prompt"'),
        ('{"prompt": 3}', '"prompt" must be a string'),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=rf"--prompts: {file}:3: ({reason})"):
        read_prompts(file)
