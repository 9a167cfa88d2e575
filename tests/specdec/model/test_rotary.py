"""Rotary tables that depend on the length: every sequence of a batch gets its own."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.core.kv_variants import KvVariants
from specdec.model.batch import PositionShift, SequenceSlice
from specdec.model.config import CompileConfig
from specdec.model.graphs import CompiledForward
from specdec.model.rotary import RotaryRule, install, rule_of
from specdec.model.runner import ModelRunner
from tests.architectures import ORIGINAL_POSITIONS, VOCAB_SIZE, make_model
from tests.specdec.model.conftest import Pair

PairOf = Callable[[str], Pair]
ARCHITECTURES = ("phi3_longrope", "llama_dynamic_ntk")
LENGTHS = (9, 50, ORIGINAL_POSITIONS, ORIGINAL_POSITIONS + 1)
TOLERANCE = 2e-5


def tokens_of(length: int) -> list[int]:
    return random.Random(length).choices(range(2, VOCAB_SIZE), k=length)


def expected_logits(architecture: str, token_ids: list[int]) -> torch.Tensor:
    """Of a fresh model: transformers' own tables remember the longest sequence so far."""
    with torch.inference_mode():
        return make_model(architecture)(torch.tensor([token_ids])).logits[0]


def slice_of(
    runner: ModelRunner, index: int, token_ids: list[int], start: int = 0, num_tokens: int | None = None
) -> SequenceSlice:
    """Rows from `start` on of a prompt of `num_tokens` tokens (all of them when it is not given)."""
    rotary = runner.loaded.rotary
    assert rotary is not None
    length = len(token_ids) if num_tokens is None else num_tokens
    return SequenceSlice(
        token_ids=token_ids[start:],
        start=start,
        block_table=range(1 + index * 25, 1 + (index + 1) * 25),
        num_logit_rows=len(token_ids) - start,
        shift=rotary.shift(rotary.variants.of(num_prompt_tokens=length, num_tokens=length), length),
    )


def runner_of(pair: Pair, *, compiled: bool) -> ModelRunner:
    runner = pair.runner()
    if compiled:
        runner.graphs = forward = CompiledForward(runner, CompileConfig())
        if forward.warm_up() != "ready":
            pytest.skip("no compiled forward here")
    return runner


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_short_and_long_together_equal_each_alone(pair_of: PairOf, architecture: str, compiled: bool) -> None:
    runner = runner_of(pair_of(architecture), compiled=compiled)
    prompts = [tokens_of(length) for length in LENGTHS]
    slices = [slice_of(runner, index, prompt) for index, prompt in enumerate(prompts)]
    together = runner.forward(slices).split(LENGTHS)
    for prompt, piece, logits in zip(prompts, slices, [one.clone() for one in together], strict=True):
        torch.testing.assert_close(logits, runner.forward([piece]), rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(logits, expected_logits(architecture, prompt), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_chunks_of_a_long_prompt_know_its_length(pair_of: PairOf, architecture: str, compiled: bool) -> None:
    runner = runner_of(pair_of(architecture), compiled=compiled)
    prompt = tokens_of(50)
    rows = []
    for start, end in ((0, 20), (20, 41), (41, 50)):
        rows.append(runner.forward([slice_of(runner, 0, prompt[:end], start, 50)]).clone())
    torch.testing.assert_close(torch.cat(rows), expected_logits(architecture, prompt), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_negative_control_the_length_matters(pair_of: PairOf, architecture: str) -> None:
    runner = pair_of(architecture).runner()
    long = slice_of(runner, 0, tokens_of(50))
    assert long.shift is not None
    logits = runner.forward([long]).clone()
    assert (runner.forward([replace(long, shift=None)]) - logits).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_compiled(pair_of: PairOf, architecture: str) -> None:
    """All of LongRoPE; of dynamic NTK all but prompts beyond the original length."""
    runner = runner_of(pair_of(architecture), compiled=True)
    assert runner.graphs is not None
    for length in LENGTHS:
        inputs = runner.pack([slice_of(runner, 0, tokens_of(length))])
        is_compiled = length <= ORIGINAL_POSITIONS or architecture == "phi3_longrope"
        assert (runner.graphs.try_run(inputs) is not None) == is_compiled
    # Rows behind the prompt.
    inputs = runner.pack([slice_of(runner, 0, tokens_of(50), start=40, num_tokens=20)])
    assert runner.graphs.try_run(inputs) is not None


def test_shifts() -> None:
    long = RotaryRule(kind="longrope", variants=KvVariants(original_len=32, by_prompt=False), stride=100)
    assert long.num_position_ids == 200
    assert long.variants.of(num_prompt_tokens=5, num_tokens=32) == 0
    assert long.variants.of(num_prompt_tokens=5, num_tokens=33) == 1
    assert [long.variants.num_tokens_left(length) for length in (5, 32, 33)] == [27, 0, None]
    assert long.shift(0, 5) is None
    assert long.shift(1, 5) == PositionShift(100, sys.maxsize)
    assert replace(long, stride=32).num_position_ids == 32, "no sequence is that long"
    dynamic = RotaryRule(kind="dynamic", variants=KvVariants(original_len=32, by_prompt=True), stride=100)
    assert dynamic.num_position_ids == 100
    assert dynamic.variants.num_tokens_left(5) is None
    assert dynamic.variants.of(num_prompt_tokens=32, num_tokens=60) == 0
    assert dynamic.variants.of(num_prompt_tokens=40, num_tokens=60) == 40
    assert dynamic.shift(40, 40) == PositionShift(4000, 40)


def rotary_module(model: torch.nn.Module) -> Any:
    (found,) = (module for module in model.modules() if hasattr(module, "inv_freq"))
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("how", ["as it is", "factors", "pairs side by side", "never long"])
def test_an_embedding_that_says_something_else_is_not_replaced(architecture: str, how: str) -> None:
    model = make_model(architecture)
    rule = rule_of(model.config, 4 * ORIGINAL_POSITIONS)
    assert rule is not None
    module = rotary_module(model)
    own = module.forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if how == "never long":
            position_ids = position_ids.clamp(max=ORIGINAL_POSITIONS - 1)
        cosines, sines = own(x, position_ids)
        if how == "factors":
            return 1.05 * cosines, 1.05 * sines
        half = cosines.shape[-1] // 2
        if how == "pairs side by side":
            return tuple(one[..., :half].repeat_interleave(2, -1) for one in (cosines, sines))  # type: ignore[return-value]
        return cosines, sines

    module.forward = forward
    assert install(model, rule) == (how == "as it is")
    assert (module.forward is forward) == (how != "as it is")


def test_tables_are_as_exact_as_the_models_own() -> None:
    """OLMo 2 turns in float32, whatever the model's dtype is."""
    model = make_model("llama_dynamic_ntk").bfloat16()
    rule = rule_of(model.config, 4 * ORIGINAL_POSITIONS)
    assert rule is not None
    module = rotary_module(model)
    own = module.forward
    module.forward = lambda x, position_ids: own(x.float(), position_ids)
    assert install(model, rule)
    cosines, sines = module.forward(torch.zeros(1, dtype=torch.bfloat16), torch.arange(5)[None])
    assert cosines.dtype == sines.dtype == torch.float32
