"""Requests that do not say how they are sampled: as the checkpoint has it, if the server goes by that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from deploy.cli.generate import generate_text, sampling_params
from deploy.config import DrafthouseConfig
from deploy.door_settings import door_settings
from deploy.openai.app import create_app
from deploy.openai.settings import DoorSettings
from deploy.openai.tokenization import HuggingFaceTokenizer
from specdec.core.sampling_params import SamplingDefaults, SamplingParams
from specdec.engine.async_engine import AsyncEngine
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.kv.config import CacheConfig
from specdec.model.config import CompileConfig, ModelConfig
from specdec.proposers.config import SpeculativeConfig
from tests.architectures import make_tokenizer, save_model
from tests.deploy.openai.fakes import DESCRIPTION, Door, ScriptedService
from tests.deploy.openai.live import live_server

DEFAULTS = SamplingDefaults(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1)


def asked(fields: dict[str, Any], *, takes_model_defaults: bool = True, chat: bool = False) -> SamplingParams:
    service = ScriptedService(described=replace(DESCRIPTION, sampling_defaults=DEFAULTS))
    door = Door(service, DoorSettings(takes_model_defaults=takes_model_defaults))
    answer = door.chat(**fields) if chat else door.complete(**fields)
    assert answer.status_code == 200, answer.text
    return service.requests[0].params


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("fields", [{}, {"temperature": None, "top_p": None, "repetition_penalty": None}])
def test_what_a_request_does_not_say(fields: dict[str, Any], chat: bool) -> None:
    params = asked(fields, chat=chat)
    assert (params.temperature, params.top_k, params.top_p) == (0.7, 20, 0.8)
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.1)


def test_what_it_does_say() -> None:
    """OpenAI's own defaults as well, if a request has them."""
    params = asked({"temperature": 1, "top_p": 1, "repetition_penalty": 1, "top_k": -1})
    assert params.temperature == params.top_p == params.repetition_penalty == 1.0
    assert params.top_k is None
    assert asked({"temperature": 0}).repetition_penalty == 1.1


def test_a_server_may_leave_the_file_aside() -> None:
    params = asked({}, takes_model_defaults=False)
    assert params.temperature == params.top_p == params.repetition_penalty == 1.0
    assert params.top_k is None


@pytest.mark.parametrize(("said", "takes"), [({}, True), ({"generation_config": "none"}, False)])
def test_the_configuration_reaches_the_door(said: dict[str, str], takes: bool) -> None:
    config = DrafthouseConfig.model_validate({"target": {"model": "m"}, "http": said})
    assert door_settings(config.http, config.served_models()[0]).takes_model_defaults is takes


def test_fingerprints_tell_by_which_defaults() -> None:
    described = replace(DESCRIPTION, sampling_defaults=DEFAULTS)
    other = replace(DESCRIPTION, sampling_defaults=SamplingDefaults(temperature=0.7))
    plain = DoorSettings().system_fingerprint(DESCRIPTION)
    by_file = {DoorSettings().system_fingerprint(one) for one in (DESCRIPTION, described, other)}
    assert len(by_file) == 3
    assert DoorSettings(takes_model_defaults=False).system_fingerprint(described) == plain


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(
        target=ModelConfig(
            model=str(folder), dtype="float32", device="cpu", compile=CompileConfig(mode="off")
        ),
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=3),
        cache=CacheConfig(num_blocks=32),
    )


@pytest.mark.usefixtures("threads_as_before")
def test_each_id_of_the_file_ends_texts_however_they_are_generated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path, seed=1)
    make_tokenizer().save_pretrained(tmp_path)
    config, prompt = config_of(tmp_path), "def f(x):"
    said = SamplingParams(temperature=0.0, max_tokens=20)
    with Engine(config) as engine:
        whole = engine.generate(prompt, said)[0].token_ids
    last = next(index for index in range(3, len(whole)) if whole[index] not in whole[:index])
    ends = {"eos_token_id": [0, 1, whole[last]], "temperature": 0.0}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    with Engine(config) as engine:
        choice = engine.generate(prompt, said)[0].choices[0]
        assert (choice.token_ids, choice.finish_reason) == (whole[: last + 1], "stop")
    generate_text(prompt, config, sampling_params(config.target, {"max_tokens": 20}, takes_defaults=True))
    printed, summary = capsys.readouterr()
    assert (printed, "ended by stop" in summary) == (choice.text + "\n", True)
    service = AsyncEngine(Engine(config))
    try:
        with live_server(create_app(service, DoorSettings(), HuggingFaceTokenizer.load(tmp_path))) as url:
            body = {"prompt": prompt, "max_tokens": 20}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]
    finally:
        service.close()
    assert (answer["text"], answer["finish_reason"]) == (choice.text, "stop")


def test_greedy_is_what_transformers_generates_by_the_same_file(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    reference = save_model(folder, seed=1)
    make_tokenizer().save_pretrained(folder)
    own = transformers.GenerationConfig(repetition_penalty=1.6, eos_token_id=0, pad_token_id=0)
    own.save_pretrained(folder)
    config = config_of(folder)
    prompt = list(range(5, 25))
    generated = {}
    for name, generation_config in (("own", own), ("plain", transformers.GenerationConfig())):
        with torch.no_grad():
            output = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                generation_config=generation_config,
                do_sample=False,
                max_new_tokens=24,
                min_new_tokens=24,
                eos_token_id=None,
                pad_token_id=0,
            )
        generated[name] = output[0][len(prompt) :].tolist()
    assert generated["own"] != generated["plain"], "the penalty changes nothing: the test says nothing"
    service = AsyncEngine(Engine(config))
    try:
        with live_server(create_app(service, DoorSettings(), HuggingFaceTokenizer.load(folder))) as url:
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            body["return_token_ids"] = True
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    finally:
        service.close()
    assert answer.json()["choices"][0]["token_ids"] == generated["own"]
