"""Families that scale or cap their logits: whoever borrows their LM head says what they say."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from specdec.drafters.base import TargetParts
from specdec.drafters.eagle import Eagle
from specdec.drafters.logits import LogitScaling
from specdec.drafters.medusa import Medusa
from specdec.drafters.mtp import Mtp
from specdec.drafters.parallel_heads import ParallelHeads
from tests.architectures import make_model
from tests.specdec.drafters.conftest import tiny_config

TOKENS = torch.arange(2, 14).reshape(2, 6)


@torch.no_grad()
def final_states(model: transformers.PreTrainedModel) -> torch.Tensor:
    states: torch.Tensor = model.base_model(TOKENS).last_hidden_state
    return states


@pytest.mark.parametrize("architecture", ["llama", "granite", "cohere2", "gemma2"])
@torch.no_grad()
def test_parts_say_what_the_model_says(architecture: str) -> None:
    model = make_model(architecture)
    parts, states = TargetParts.of(model), final_states(model)
    assert torch.equal(parts.logits(states), model(TOKENS).logits)
    assert torch.equal(parts.head(states), parts.logits(states)) == (architecture == "llama")


@torch.no_grad()
def test_drafters_that_borrow_the_head_draft_at_its_temperature() -> None:
    parts = TargetParts.of(make_model("granite"))
    rows = torch.randn(5, parts.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = parts.head(rows) / 4.0
    assert torch.equal(Eagle(parts, parts.config).logits(rows), expected)
    assert torch.equal(Mtp(parts).logits(rows), expected)
    own = Mtp(parts, has_head=True)
    assert own.head is not None
    assert torch.equal(own.logits(rows), own.head(rows) / 4.0)
    normed = parts.head(parts.final_norm(rows)) / 4.0
    assert torch.equal(ParallelHeads(parts, num_heads=1).head(0, rows), normed)


@torch.no_grad()
def test_heads_of_their_own_begin_at_its_temperature() -> None:
    model = make_model("granite")
    heads = Medusa(TargetParts.of(model), num_heads=1)
    heads.start_from_target()
    torch.testing.assert_close(heads.logits(final_states(model))[0], model(TOKENS).logits)


def test_what_is_completed_keeps_its_scaling() -> None:
    """Parts in draft workers are those on paper with weights that are read later."""
    with torch.device("meta"):
        parts = TargetParts.of(
            transformers.AutoModelForCausalLM.from_config(
                transformers.GraniteConfig(
                    **{name: getattr(tiny_config(), name) for name in ("vocab_size", "hidden_size")},
                    num_hidden_layers=1,
                    num_attention_heads=4,
                    intermediate_size=24,
                    pad_token_id=0,
                    logits_scaling=8.0,
                )
            )
        )
    head = torch.nn.Linear(parts.hidden_size, parts.vocab_size, bias=False)
    rows = torch.ones(1, parts.hidden_size)
    assert torch.equal(replace(parts, head=head).logits(rows), head(rows) / 8.0)


def test_families_that_multiply_by_what_others_divide_by() -> None:
    assert LogitScaling.of(tiny_config()) == LogitScaling()
    assert LogitScaling.of(tiny_config(logits_scaling=4.0)) == LogitScaling(divisor=4.0)
    other: Any = SimpleNamespace(model_type="hyperclovax", logits_scaling=4.0)
    assert LogitScaling.of(other) == LogitScaling(factor=4.0)
