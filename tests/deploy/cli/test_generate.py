"""How `drafthouse generate` samples where its options do not say: as a door before the same model does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.generate import sampling_params
from specdec.core.errors import CheckpointError, InputError
from specdec.core.sampling_params import SamplingParams
from specdec.model.config import ModelConfig
from tests.deploy.cli.invocation import invoke

FILE = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1, "eos_token_id": [0, 5]}
BY_FILE = SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1)


def target_with(folder: Path, content: Any) -> ModelConfig:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return ModelConfig(model=str(folder))


def test_what_is_not_said_is_as_the_checkpoint_has_it(tmp_path: Path) -> None:
    target = target_with(tmp_path, FILE)
    assert sampling_params(target, {}, takes_defaults=True) == BY_FILE
    said = sampling_params(target, {"temperature": 0.0, "top_k": None, "seed": 3}, takes_defaults=True)
    assert said == SamplingParams(temperature=0.0, top_p=0.8, repetition_penalty=1.1, seed=3)


def test_without_a_word_of_the_checkpoint_it_is_greedy(tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0.0)
    assert sampling_params(target_with(tmp_path, FILE), {}, takes_defaults=False) == greedy
    assert sampling_params(target_with(tmp_path, {}), {}, takes_defaults=True) == greedy
    assert sampling_params(ModelConfig(model=str(tmp_path / "none")), {}, takes_defaults=True) == greedy
    only_cut = sampling_params(target_with(tmp_path, {"top_p": 0.5}), {}, takes_defaults=True)
    assert only_cut == SamplingParams(temperature=0.0, top_p=0.5)


def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="top_p must be in"):
        sampling_params(target_with(tmp_path, FILE), {"top_p": 2.0}, takes_defaults=True)
    with pytest.raises(CheckpointError, match=r"generation_config\.json must hold a JSON object"):
        sampling_params(target_with(tmp_path, [1]), {}, takes_defaults=True)


@pytest.mark.parametrize(
    ("http", "options", "expected"),
    [
        ("", (), BY_FILE),
        ("http: {generation_config: none}", (), SamplingParams(temperature=0.0)),
        (
            "",
            ("--temperature", 0, "--top-p", 1, "--top-k", 0, "--min-p", 0.1, "--repetition-penalty", 1),
            SamplingParams(temperature=0.0, min_p=0.1),
        ),
    ],
)
def test_options_and_configuration(
    config: Path,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    http: str,
    options: tuple[object, ...],
    expected: SamplingParams,
) -> None:
    shutil.copytree(models / "target", tmp_path / "target")
    target_with(tmp_path / "target", FILE)
    config.write_text(config.read_text().replace(f"{models}/target", f"{tmp_path}/target") + http + "\n")
    seen: list[SamplingParams] = []
    monkeypatch.setattr(
        "deploy.cli.generate.generate_text", lambda prompt, engine, params: seen.append(params)
    )
    sources = [("-c", config)] if http else [("-c", config), ("--model", tmp_path / "target")]
    for source in sources:
        code, _, stderr = invoke("generate", "a", *source, *options, "--max-tokens", 9, "--seed", 1)
        assert code == 0, stderr
    given = {"max_tokens": 9, "seed": 1}
    wanted = SamplingParams(**{name: getattr(expected, name) for name in expected.__struct_fields__} | given)
    assert seen == [wanted] * len(sources)
