"""What an engine's configuration refuses across its blocks, by the full name of the key."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from specdec.engine.config import EngineConfig
from specdec.proposers.config import HEAD_METHODS
from specdec.proposers.draft_model_factory import draft_model_config
from specdec.proposers.target_facts import TargetFacts

CPU = {"attention_backend": "cpu"}
FLASHINFER = {"attention_backend": "flashinfer"}
DRAFT = {"method": "draft_model", "model": "draft"}
HEADS = {"method": "eagle", "model": "heads"}


def engine_config(target: dict[str, Any], draft: dict[str, Any] | None = None) -> EngineConfig:
    data: dict[str, Any] = {"target": {"model": "target", **target}}
    if draft is not None:
        data["speculative_config"] = draft
    return EngineConfig.model_validate(data)


def test_target_and_draft_choose_their_attention_apart() -> None:
    config = engine_config({**FLASHINFER, "device": "cuda"}, {**DRAFT, "attention_backend": "triton"})
    assert config.target.attention_backend == "flashinfer"
    assert config.speculative_config.attention_backend == "triton"
    config = engine_config({}, {**DRAFT, **FLASHINFER})
    assert config.target.attention_backend == "auto"
    facts = TargetFacts(vocab_size=8, dtype="bfloat16", max_num_seqs=1, model=None)
    loaded_as = draft_model_config(config.speculative_config, facts)
    assert loaded_as.attention_backend == "flashinfer"  # so that loading it refuses what it cannot run


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        (
            {"device": "cpu", **FLASHINFER},
            None,
            r"target\.attention_backend: flashinfer .*, and the device is cpu: set device to cuda",
        ),
        (
            {"dtype": "float32", **FLASHINFER},
            None,
            r"target\.attention_backend: flashinfer .*not run float32: set dtype to bfloat16 or float16",
        ),
        (
            {},
            {"device": "cpu", **DRAFT, **FLASHINFER},
            r"speculative_config\.attention_backend: flashinfer .*the device is cpu",
        ),
        (
            {"dtype": "float32"},  # which the draft model takes over
            {**DRAFT, **FLASHINFER},
            r"speculative_config\.attention_backend: flashinfer .*not run float32",
        ),
        (
            {"batch_invariant": True, **FLASHINFER},
            None,
            "batch_invariant does not go with attention_backend: flashinfer, whose splits follow the batch",
        ),
        (
            {"device": "cuda:1", **CPU},
            None,
            r"target\.attention_backend: cpu cannot be had: .* the device is cuda:1: set device to cpu, or",
        ),
        (
            {"dtype": "float16"},
            {**DRAFT, **CPU},
            r"speculative_config\.attention_backend: cpu .*not run float16: set dtype to float32 or bfloat16",
        ),
        (
            {},
            {"method": "ngram", **FLASHINFER},
            "attention_backend: flashinfer is about draft_model and heads .*; method ngram has none: leave",
        ),
        (
            {},
            {"method": "medusa", "model": "heads", **CPU},
            "attention_backend: cpu is about .*; method medusa has none: leave it out",
        ),
        (
            {},
            {"method": "several", "drafters": [{"name": "a", "method": "ngram"}], **CPU},
            "method several has none: write it with those of `drafters`",
        ),
        (
            {},
            {"method": "layerskip", "exit_layer": 1, **CPU},
            "method layerskip drafts with the target's attention: leave it out, or write target.attention_b",
        ),
        (
            {"dtype": "float16"},  # which heads run in, too
            {**HEADS, **CPU},
            r"speculative_config\.attention_backend: cpu .*not run float16: set dtype to float32 or bfloat16",
        ),
        ({"attention_backend": "flash"}, None, "(?s)target.attention_backend.*'triton' or 'flashinfer'"),
        (
            {},
            {**DRAFT, "attention_backend": "FLASHINFER"},
            "(?s)speculative_config.attention_backend.*'triton' or 'flashinfer'",
        ),
    ],
)
def test_attention_that_cannot_be_had(
    target: dict[str, Any], draft: dict[str, Any] | None, message: str
) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        engine_config(target, draft)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_attention_that_can_be_had(dtype: str) -> None:
    engine_config({"dtype": dtype, **FLASHINFER}, {**DRAFT, **FLASHINFER})
    engine_config({"dtype": "float32"}, {"dtype": "bfloat16", **DRAFT, **FLASHINFER})
    engine_config({"batch_invariant": True, "dtype": "float32", **CPU}, {"device": "cpu", **DRAFT, **CPU})


@pytest.mark.parametrize("method", sorted(HEAD_METHODS - {"medusa"}))
@pytest.mark.parametrize("place", ["target", "draft_pool"])
def test_heads_with_keys_and_values_choose_their_attention(method: str, place: str) -> None:
    config = engine_config({}, {**HEADS, "method": method, "heads_at": place, **CPU})
    assert config.speculative_config.attention_backend == "cpu"


@pytest.mark.parametrize(
    ("target", "draft", "where"),
    [
        ({"device": "tpu"}, None, "target.device"),
        ({"device": "cuda:first"}, None, "target.device"),
        ({"device": "cpu\n"}, None, "target.device"),
        ({}, {**DRAFT, "device": "gpu"}, "speculative_config.device"),
    ],
)
def test_devices_that_there_are_no_kernels_for(
    target: dict[str, Any], draft: dict[str, Any] | None, where: str
) -> None:
    with pytest.raises(ValueError, match=rf"(?s){where}.*auto\|cpu\|cuda"):
        engine_config(target, draft)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:15"])
def test_devices_that_there_are_kernels_for(device: str) -> None:
    assert engine_config({"device": device}, None).target.device == device
