"""Drafts that attend to a copy of the target's K/V in 8 bits (`kv.dtype: int8`).

That nothing of it shows is seen with all other drafters (`test_every_drafter`); here, that drafts are those
of K/V in 8 bits, that the target's own stay as they are, and what it takes.
"""

from __future__ import annotations

import copy
from typing import Any

import pydantic
import pytest
import torch
import transformers

from specdec.attention.sdpa import SdpaAttention
from specdec.core.errors import ConfigError
from specdec.core.sampling_params import SamplingParams
from specdec.engine.build_target import build_target
from specdec.engine.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.targets.local_target import LocalTarget
from specdec.kv import packed_rows
from specdec.kv.config import CacheConfig
from specdec.kv.packed_copy import PackedCopy
from specdec.kv.packed_rows import pack_rows, unpack_rows
from specdec.model.runner import ModelRunner
from specdec.proposers.config import SpeculativeConfig
from tests.specdec.engine.sampling_kinds import KINDS
from tests.specdec.engine.target_alone import LONG, Rounds, draft_behind
from tests.specdec.engine.tiny_models import PROMPTS, Models, SharpModels

pytestmark = pytest.mark.usefixtures("one_thread", "quantizer")
SELF: dict[str, Any] = {"method": "self", "kv": {"dtype": "int8"}}
QUANTIZED: dict[str, Any] = {"method": "quantized", "quantization": "int8", "kv": {"dtype": "int8"}}
UNENDING = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Attention of which it shows what it sees."""
    return SharpModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def folder(models: Models, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model as a folder: `SharpModels` sharpens what is loaded, not what was saved."""
    path = tmp_path_factory.mktemp("sharp")
    models.reference("llama").save_pretrained(path)
    source = models.load("llama").path
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((source / name).read_bytes())
    return str(path)


def config_of(
    folder: str, speculative: dict[str, Any], *, compiled: bool = False, **target: Any
) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "target": {
                "model": folder,
                "dtype": "float32",
                "compile": {"mode": "auto" if compiled else "off"},
                **target,
            },
            "speculative_config": {"controller": "fixed", **speculative},
            "cache": {"block_size": 4, "num_blocks": 60},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
        }
    )


def target_of(config: EngineConfig) -> LocalTarget:
    target = build_target(config)
    assert isinstance(target, LocalTarget)
    for work in target.idle_work:
        while work.pending():
            work.run_next()
    return target


class RoundedCache(transformers.DynamicCache):
    """Keeps K and V as they come back from 8 bits."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        rounded = (unpack_rows(pack_rows(one), one.dtype) for one in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


def reference_draft(models: Models, num_tokens: int, *, rounds: bool = True) -> tuple[int, ...]:
    """What transformers drafts behind `LONG`, over the model's own K/V of it, rounded or not."""
    model: Any = copy.deepcopy(models.reference("llama"))
    with torch.inference_mode():
        exact = model(torch.tensor([LONG[:-1]]), use_cache=True).past_key_values
        past: Any = RoundedCache() if rounds else transformers.DynamicCache()
        for index, layer in enumerate(exact.layers):
            past.update(layer.keys, layer.values, index)
        tokens = [LONG[-1]]
        for _ in range(num_tokens):
            output = model(torch.tensor([tokens[-1:]]), past_key_values=past, use_cache=True)
            tokens.append(int(output.logits[0, -1].argmax()))
    return tuple(tokens[1:])


@pytest.mark.parametrize("compiled", [False, True])
def test_drafts_are_those_of_k_and_v_in_8_bits(models: Models, folder: str, compiled: bool) -> None:
    target = target_of(config_of(folder, SELF, compiled=compiled))
    assert draft_behind(target, 8) == reference_draft(models, 8)
    if compiled:
        assert all(work.state == "ready" for work in target.idle_work)


def test_of_fewer_steps_too(models: Models, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the above: 8 bits are so exact that drafts are seldom others for it."""
    monkeypatch.setattr(packed_rows, "_LARGEST", 1.0)
    coarse = reference_draft(models, 8)
    assert coarse != reference_draft(models, 8, rounds=False)
    assert draft_behind(target_of(config_of(folder, SELF)), 8) == coarse


def test_control_a_copy_that_is_not_made_shows(
    models: Models, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedCopy, "copy", lambda self, slots: None)
    assert draft_behind(target_of(config_of(folder, SELF)), 8) != reference_draft(models, 8)


@pytest.mark.parametrize("keys", [SELF, QUANTIZED], ids=["self", "quantized"])
def test_the_targets_k_and_v_stay_as_plain_decoding_leaves_them(folder: str, keys: dict[str, Any]) -> None:
    """To the last bit, drafts that are wrong included."""
    drafting, plain = (Rounds(target_of(config_of(folder, keys, compiled=True))) for _ in range(2))
    drafting.run(24, 5)
    plain.run(24, 0)
    assert drafting.tokens[: len(LONG) + 24] == plain.tokens[: len(LONG) + 24]
    for mine, expected in zip(drafting.kept(23), plain.kept(23), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("tree", [None, {"shape": "static", "widths": [2, 1]}], ids=["chains", "trees"])
def test_each_token_is_copied_once(
    folder: str, tree: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    monkeypatch.setattr(PackedCopy, "copy", lambda self, slots: copied.extend(slots))
    keys = SELF if tree is None else {**SELF, "tree": tree, "num_speculative_tokens": 4}
    with Engine(config_of(folder, keys)) as engine:
        (result,) = engine.generate([PROMPTS[6]], UNENDING)
    assert len(copied) == len(set(copied))
    length = len(PROMPTS[6]) + len(result.token_ids)
    assert length - 8 < len(copied) < length


@pytest.mark.parametrize("kind", ["greedy", "plain"])
def test_drafts_are_nearly_always_right(folder: str, kind: str) -> None:
    """The target over its own K/V in 8 bits: a wrong scale, slot or position would cost most of it."""
    params = KINDS[kind]
    with Engine(config_of(folder, SELF)) as engine:
        engine.generate(PROMPTS, params)
        metrics = engine.metrics()
    assert metrics.num_accepted_tokens > 0.8 * metrics.num_draft_tokens > 50


def test_memory_is_planned_for_the_copy(folder: str) -> None:
    """Heads of 8 numbers in fp32: 32 bytes in the pool, 12 in the copy."""
    sized = {"block_size": 4, "memory_bytes": 1 << 17}
    runners = []
    for keys in ({"method": "self"}, SELF):
        config = config_of(folder, keys)
        runners.append(
            target_of(config.model_copy(update={"cache": config.cache.model_validate(sized)})).runner
        )
    alone, beside = runners
    num_rows = 4 * 3 * 2 * 2  # tokens of a block, layers, heads, K and V
    assert alone.num_blocks == (1 << 17) // (32 * num_rows)
    assert beside.num_blocks == (1 << 17) // (44 * num_rows)
    assert alone.packed_copy is None
    assert beside.packed_copy is not None
    assert beside.packed_copy.num_bytes == beside.num_blocks * 12 * num_rows


def test_a_backend_that_does_not_read_it_is_refused_by_name(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SdpaAttention, "reads_packed", False)
    with pytest.raises(ConfigError, match=r"kv\.dtype: int8 does not go with attention backend sdpa yet"):
        ModelRunner(models.load("llama"), CacheConfig(num_blocks=9), max_num_seqs=2, drafts_packed=True)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"method": "draft_model", "model": "m", "kv": {"dtype": "int8"}}, "method draft_model makes none"),
        ({"method": "ngram", "kv": {"dtype": "int8"}}, "kv.dtype: int8 is a copy .* method ngram makes none"),
        ({"method": "self", "kv": {"dtype": "int4"}}, "(?s)kv.dtype.*'auto' or 'int8'"),
    ],
)
def test_settings_that_cannot_be(block: dict[str, Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        SpeculativeConfig.model_validate(block)
