"""What `speculative_config.kv` cannot be is refused before anything starts, by the name of the setting."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from deploy.config_file import load_config
from deploy.openai.app import create_app
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.core.errors import ConfigError
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.engine import Engine
from specdec.model.on_paper import check_servable
from tests.deploy.cli.invocation import invoke, user_error
from tests.deploy.openai.live import live_server


class Mistake(NamedTuple):
    speculative: str
    """As in a file; MODELS is the folder of the tiny models, of 256 positions."""
    said: str
    """The setting, what is wrong, what would be right."""
    target: str = ""


MISTAKES = {
    "budget": Mistake(
        "{method: self, num_speculative_tokens: 4, kv: {policy: streaming, budget: 7}}",
        r"kv\.budget: 7 tokens do not hold kv\.sink_tokens \(4\) and a draft of num_speculative_tokens "
        r"\(4\): give at least 8",
    ),
    "budget of a draft model": Mistake(
        "{method: draft_model, model: MODELS/draft, num_speculative_tokens: 9, "
        "kv: {policy: streaming, budget: 16, sink_tokens: 8}}",
        r"kv\.budget: 16 tokens do not hold kv\.sink_tokens \(8\) .* \(9\): give at least 17",
    ),
    "floor": Mistake(
        "{method: self, kv: {policy: streaming, budget: 5%, floor: 6}}",
        r"kv\.floor: 6 tokens do not hold .* give at least 8",
    ),
    "no budget": Mistake("{method: self, kv: {policy: streaming, budget: 0}}", "budget: 0 tokens are none"),
    "no share": Mistake(
        "{method: self, kv: {policy: streaming, budget: 150%}}",
        r"budget: 1\.5 is no share of the length \(above 0, at most 1\); write an integer for tokens",
    ),
    "a word of YAML": Mistake(
        "{method: self, kv: {policy: streaming, budget: true}}",
        r'kv: budget: must be a number of tokens, or a share such as "5%" or 0\.05',
    ),
    "no number": Mistake(
        "{method: self, kv: {policy: streaming, budget: much}}",
        r"""budget: 'much' is not a number of tokens, nor a share such as "5%" or 0\.05""",
    ),
    "policy": Mistake("{method: self, kv: {policy: stream}}", "policy: input should be 'full'"),
    "a policy of the target": Mistake(
        "{method: draft_model, model: MODELS/draft, kv: {policy: snapkv}}",
        r"kv\.policy: snapkv needs method self, .*write policy: streaming",
    ),
    "scores that are none": Mistake(
        "{method: self, kv: {policy: streaming, rescore_every: 3}}",
        "rescore_every: policy streaming scores nothing: leave it out",
    ),
    "a method without a model": Mistake(
        "{method: ngram, kv: {policy: streaming}}",
        "policy: streaming .* method ngram has none: leave out kv",
    ),
    "stages": Mistake(
        "{method: self}",
        r"speculative_config\.method: self does not go with target\.pipeline_parallel_size: 2 yet: write 1",
        target="pipeline_parallel_size: 2, ",
    ),
    "a rule": Mistake(
        "{method: self, rejection_sample_method: block}",
        "rejection_sample_method: block does not go with method self.* write sample_and_match",
    ),
    "positions of the target": Mistake(
        "{method: self, kv: {policy: streaming, positions: in_cache}}",
        r"kv\.positions: in_cache .* with method self tokens keep theirs: leave it out",
    ),
    "positions of everything": Mistake(
        "{method: draft_model, model: MODELS/draft, kv: {positions: in_cache}}",
        r"kv\.positions: in_cache .* kv\.policy: full keeps everything: write policy: streaming",
    ),
    "unknown positions": Mistake(
        "{method: draft_model, model: MODELS/draft, kv: {policy: streaming, positions: rolled}}",
        "positions: input should be 'auto', 'absolute' or 'in_cache'",
    ),
    "positions of the text": Mistake(
        "{method: draft_model, model: MODELS/draft, max_model_len: 100, "
        "kv: {policy: streaming, budget: 16, positions: absolute}}",
        r"kv\.positions: absolute, with which draft drafts behind texts of up to 100 tokens .* target serves "
        r"up to 256: leave it out and write kv\.policy: streaming, or write target\.max_model_len: 100",
    ),
    "positions of the text, without a window": Mistake(
        "{method: draft_model, model: MODELS/draft, max_model_len: 100, kv: {positions: absolute}}",
        r"kv\.positions: absolute, .* up to 100 tokens .* up to 256: leave it out",
    ),
    "too few positions": Mistake(
        "{method: draft_model, model: MODELS/draft, "
        "kv: {policy: streaming, budget: 240, positions: in_cache}}",
        r"kv\.budget: 240 tokens do not fit into the 256 positions of draft .* give at most 215",
    ),
    "fewer positions": Mistake(
        "{method: draft_model, model: MODELS/draft, max_model_len: 100, "
        "kv: {policy: streaming, floor: 80, positions: in_cache}}",
        r"kv\.floor: 80 tokens do not fit into the 100 positions of draft .* give at most 59",
    ),
    "too long for the target": Mistake(
        "{method: self}",
        r"max_model_len(: 300 is more than| = 300 exceeds) the 256 positions",
        target="max_model_len: 300, ",
    ),
}

SAID_BY_THE_MODELS = (
    "too few positions",
    "fewer positions",
    "positions of the text",
    "positions of the text, without a window",
    "too long for the target",
)
"""What no file says alone."""


def write(folder: Path, models: Path, speculative: str, target: str = "") -> Path:
    file = folder / "config.yaml"
    speculative = speculative.replace("MODELS", str(models))
    settings = f'{target}model: {models}/target, dtype: float32, device: cpu, compile: {{mode: "off"}}'
    file.write_text(f"target: {{{settings}}}\nspeculative_config: {speculative}\ncache: {{num_blocks: 64}}\n")
    return file


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("command", ["config validate", "serve", "generate hello -c"])
def test_mistakes_are_refused_before_anything_starts(
    models: Path, tmp_path: Path, name: str, command: str
) -> None:
    mistake = MISTAKES[name]
    file = write(tmp_path, models, mistake.speculative, mistake.target)
    said = " ".join(user_error(*command.split(), file).split())
    assert re.search(mistake.said, said), said
    if name not in SAID_BY_THE_MODELS:
        assert f"{file.name}:" in said, "with its place"


@pytest.mark.parametrize(
    "speculative",
    [
        "{method: self, kv: {policy: streaming, budget: 8}}",
        "{method: draft_model, model: MODELS/draft, "
        "kv: {policy: streaming, budget: 215, positions: in_cache}}",
        "{method: draft_model, model: MODELS/draft, kv: {policy: streaming, floor: 20, positions: in_cache}}",
        "{method: draft_model, model: MODELS/draft, "
        "kv: {policy: streaming, budget: 16, positions: absolute}}",
    ],
)
def test_control_what_is_just_enough_is_taken(models: Path, tmp_path: Path, speculative: str) -> None:
    assert invoke("config", "validate", write(tmp_path, models, speculative))[0] == 0


@pytest.mark.parametrize(
    ("speculative", "said"),
    [
        (
            "{method: draft_model, model: MODELS/draft, max_model_len: 64}",
            r"warning: draft drafts behind texts of up to 64 tokens .* up to 256: .*kv\.policy: streaming",
        ),
        (
            "{method: draft_model, model: MODELS/draft, max_model_len: 64, "
            "kv: {policy: streaming, budget: 40}}",
            r"warning: draft drafts behind texts of up to 64 tokens .*kv\.budget: 40 tokens do not fit into "
            r"the 64 positions of draft .* give at most 23",
        ),
        (
            "{method: draft_model, model: MODELS/draft, max_model_len: 64, "
            "kv: {policy: streaming, budget: 16}}",
            "",
        ),
        (
            "{method: draft_model, model: MODELS/draft, "
            "kv: {policy: streaming, budget: 150, positions: in_cache}}",
            r"warning: .*kv\.budget: 150 is more than half of the 256 positions of draft: .* every 66 tokens",
        ),
        ("{method: draft_model, model: MODELS/draft}", ""),
        ("{method: self}", r"kv\.policy: full: with method self .* write policy: streaming"),
        ("{method: self, kv: {policy: verified}}", ""),
        (
            "{method: draft_model, model: MODELS/draft, kv: {budget: 512, sink_tokens: 0}}",
            r"kv\.budget: 512 counts for nothing with kv\.policy: full, .* write kv\.policy: streaming, or "
            r"leave it out warning: speculative_config\.kv\.sink_tokens: 0 counts for nothing",
        ),
        ("{method: ngram, kv: {floor: 8}}", r"kv\.floor: 8 counts .* attend to everything: leave it out"),
        (
            "{method: draft_model, model: MODELS/draft, cache: {num_blocks: 4}, "
            "kv: {policy: streaming, budget: 64}}",
            r"cache\.num_blocks: 4 makes a pool of 4 blocks of 16 tokens, and the window of "
            r".*kv\.budget: 64 takes up to 9: texts of more than 48 tokens go on without drafts",
        ),
        (
            "{method: draft_model, model: MODELS/draft, cache: {num_blocks: 9}, "
            "kv: {policy: streaming, budget: 64}}",
            "",
        ),
        (
            "{method: draft_model, model: MODELS/draft, max_model_len: 100, cache: {num_blocks: 4}, "
            "kv: {policy: streaming, budget: 16}}",
            r"cache\.num_blocks: 4 makes .* takes up to 6: texts of more than 48 tokens",
        ),
    ],
)
def test_what_may_not_be_meant_is_said_before_anything_starts(
    models: Path, tmp_path: Path, speculative: str, said: str
) -> None:
    code, stdout, stderr = invoke("config", "validate", write(tmp_path, models, speculative))
    assert code == 0
    assert "ok (" in stdout
    assert re.search(said, " ".join(stderr.split())) if said else stderr == ""


def with_dynamic_ntk(models: Path, folder: Path, *, is_old: bool) -> None:
    """Give a copy of the models 64 positions, and dynamic NTK that makes 256 of them, in old words or new."""
    for name in ("target", "draft"):
        shutil.copytree(models / name, folder / name)
        file = folder / name / "config.json"
        settings = json.loads(file.read_text()) | {"max_position_embeddings": 64}
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        if is_old:
            del settings["rope_parameters"]
            settings |= {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "rope_theta": 10000.0}
        file.write_text(json.dumps(settings if is_old else settings | {"rope_parameters": rope}))


@pytest.mark.parametrize("is_old", [False, True])
def test_the_factor_of_dynamic_ntk_counts_before_anything_starts(
    models: Path, tmp_path: Path, is_old: bool
) -> None:
    """What the loader serves is taken, what it refuses is refused; positions that drafts are given among what
    is kept are those before K/V depend on the length.
    """
    with_dynamic_ntk(models, tmp_path, is_old=is_old)
    window = "{method: self, kv: {policy: streaming, budget: 16}}"
    for num_positions in (256, 257):
        file = write(tmp_path, tmp_path, window, f"max_model_len: {num_positions}, ")
        target = load_config(file).target
        if num_positions == 256:
            assert check_servable(target).max_model_len == 256
            assert invoke("config", "validate", file)[0] == 0
        else:
            with pytest.raises(ConfigError, match="257 exceeds the 256 positions"):
                check_servable(target)
            said = " ".join(user_error("config", "validate", file).split())
            assert re.search(r"max_model_len: 257 .* 256 positions .*by max_position_emb", said)
    draft = "method: draft_model, model: MODELS/draft"
    absolute = f"{{{draft}, kv: {{policy: streaming, budget: 16, positions: absolute}}}}"
    assert invoke("config", "validate", write(tmp_path, tmp_path, absolute))[0] == 0
    too_many = f"{{{draft}, kv: {{policy: streaming, budget: 40, positions: in_cache}}}}"
    said = " ".join(user_error("config", "validate", write(tmp_path, tmp_path, too_many)).split())
    assert re.search(r"kv\.budget: 40 tokens do not fit into the 64 positions .* give at most 23", said)


class Door(NamedTuple):
    client: httpx.Client
    engine: Engine

    def complete(self, num_tokens: int, max_tokens: int) -> httpx.Response:
        return self.client.post(
            "/v1/completions",
            json={
                "model": "target",
                "prompt": [5 + index % 90 for index in range(num_tokens)],
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )

    def counted(self, name: str) -> float:
        return self.engine.draft_counters.get(name, 0.0)


@contextmanager
def opened(models: Path, folder: Path, speculative: str) -> Iterator[Door]:
    config = load_config(write(folder, models, speculative)).engine()
    engine = Engine(config)
    service = AsyncEngine(engine)
    tokenizer = HuggingFaceTokenizer.load(Path(config.target.model))
    app = create_app(service, DoorSettings(served_model_name="target"), tokenizer)
    try:
        with live_server(app) as url, httpx.Client(base_url=url, timeout=60) as client:
            yield Door(client, engine)
    finally:
        service.close()


DRAFTERS = {
    "everything": ", max_model_len: 64",
    "window": ", max_model_len: 64, kv: {policy: streaming, budget: 16}",
    "in cache": ", max_model_len: 64, kv: {policy: streaming, budget: 16, positions: in_cache}",
}


def test_at_the_door_the_targets_length_counts(
    models: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Texts that are longer than the draft model's are served: with its drafts where it has a window, without
    where it reads everything; the start has said so, and a counter does. Beyond the target's they are
    refused, whatever drafts.
    """
    with opened(models, tmp_path, "{method: none}") as door:
        expected = door.complete(150, 20).json()["choices"][0]["token_ids"]
    for name, more in DRAFTERS.items():
        caplog.clear()
        settings = 'method: draft_model, model: MODELS/draft, controller: fixed, compile: {mode: "off"}'
        settings += ", cache: {num_blocks: 64, block_size: 4}"
        with opened(models, tmp_path, f"{{{settings}{more}}}") as door:
            said = [
                record.getMessage()
                for record in caplog.records
                if "drafts behind texts" in record.getMessage()
            ]
            refused = door.complete(250, 7)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "context_length_exceeded"
            assert "256" in refused.json()["error"]["message"]
            answer = door.complete(150, 20)
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["token_ids"] == expected
            metrics = door.engine.metrics()
            assert (metrics.num_draft_tokens > 0) == (name != "everything")
            assert door.counted("draft_sequences_too_long") == (name == "everything")
            assert len(said) == (name == "everything")
        if said:
            assert "up to 64 tokens" in said[0]
            assert "serves up to 256" in said[0]
            assert "kv.policy: streaming" in said[0]
