"""Batched sampling: its attention beside a plain computation of it, and the texts that it writes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.architectures import VARIED_ARCHITECTURES, make_model
from training.generation import (
    grouped_decode_attention,
    gumbel_noise,
    noisy_choice,
    sample,
    text_length,
    write_rows,
)

HEADS, KV_HEADS, SIZE, SCALING = 4, 2, 8, 0.3


def plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """Attention [B, T, heads, D], head by head; `seen` bool [B, 1, T, S]."""
    groups = HEADS // KV_HEADS
    outputs = []
    for head in range(HEADS):
        scores = query[:, head] @ key[:, head // groups].transpose(1, 2) * SCALING
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen[:, 0], float("-inf")).softmax(-1)
        outputs.append(weights @ value[:, head // groups])
    return torch.stack(outputs, dim=2)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("length", [1, 5])
def test_attention_is_what_it_says(length: int, is_masked: bool, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(length)
    num_keys = 9 if is_masked else length
    query = 3.0 * torch.randn((2, HEADS, length, SIZE), generator=generator)
    key, value = torch.randn((2, 2, KV_HEADS, num_keys, SIZE), generator=generator)
    seen = torch.ones((length, num_keys), dtype=torch.bool).tril(num_keys - length)[None, None]
    seen = seen.expand(2, 1, -1, -1).clone()
    if is_masked:
        seen[1, :, :, :3] = False
    got, _ = grouped_decode_attention(
        nn.Identity(), query, key, value, seen if is_masked else None, SCALING, softcap=softcap
    )
    torch.testing.assert_close(got, plainly(query, key, value, seen, softcap), atol=1e-5, rtol=1e-5)
    if softcap is not None:
        assert not torch.allclose(got, plainly(query, key, value, seen, None), atol=1e-3) or num_keys == 1


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_without_a_mask_a_prompt_sees_nothing_of_an_empty_cache(softcap: float | None) -> None:
    """A cache that is made for all of a text has room behind its prompt."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((2, HEADS, 5, SIZE), generator=generator)
    key, value = torch.randn((2, 2, KV_HEADS, 9, SIZE), generator=generator)
    seen = torch.ones((5, 9), dtype=torch.bool).tril()[None, None]
    got, _ = grouped_decode_attention(nn.Identity(), query, key, value, None, SCALING, softcap=softcap)
    torch.testing.assert_close(got, plainly(query, key, value, seen, softcap), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_padding_is_made_of_numbers(softcap: float | None, dtype: torch.dtype) -> None:
    """Its keys are masked everywhere, and a value that is none would count nevertheless."""
    seen = torch.ones((5, 5), dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    seen[1, :, :, :3] = False
    query = torch.ones((2, HEADS, 5, SIZE), dtype=dtype)
    key = value = torch.ones((2, KV_HEADS, 5, SIZE), dtype=dtype)
    got, _ = grouped_decode_attention(nn.Identity(), query, key, value, seen, SCALING, softcap=softcap)
    assert bool(got.isfinite().all())


def test_a_text_is_as_long_as_up_to_its_first_end() -> None:
    assert text_length([5, 6, 0, 7, 0], {0}) == 3
    assert text_length([0, 6], {0, 6}) == 1
    assert text_length([5, 6], {0}) == 2
    assert text_length([5, 6], ()) == 2


@pytest.fixture
def small(tiny_config: LlamaConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8.0)
    return model


@pytest.mark.parametrize("second", [[*range(30, 44)], [40, 7, 9]], ids=["even", "ragged"])
@pytest.mark.parametrize("architecture", VARIED_ARCHITECTURES)
@torch.no_grad()
def test_what_is_sampled_is_what_a_forward_over_all_of_a_text_says(
    architecture: str, second: list[int]
) -> None:
    model = make_model(architecture, spread=8.0)  # what it attends to decides
    if model._supports_sdpa:  # which it is loaded with then
        model.set_attn_implementation("sdpa")
    prompts = [[*range(5, 19)], [*range(60, 74)], [*range(90, 104)], second]
    heats = torch.tensor([0.7, 0.0, 0.7, 0.0])
    said = sample(model, prompts, num_tokens=10, temperatures=heats, seed=3)  # type: ignore[arg-type]
    for row, (prompt, tokens) in enumerate(zip(prompts, said, strict=True)):
        text = torch.tensor([*prompt, *tokens])[None]
        logits = model(text, use_cache=False).logits[0, len(prompt) - 1 : -1]
        noise = torch.cat([gumbel_noise(3, step, 4, logits.shape[-1])[row, None] for step in range(10)])
        assert tokens.tolist() == noisy_choice(logits, heats[row].expand(10), noise).tolist()


BEGINNINGS = torch.arange(6, 54).reshape(4, 3, 4)


def written(model: LlamaForCausalLM, ends: frozenset[int], length: int = 20) -> torch.Tensor:
    return write_rows(
        model,
        lambda number: BEGINNINGS[number % 4],
        length=length,
        temperatures=torch.tensor([0.0, 0.8, 1.5]),
        seed=3,
        ends=ends,
    )


def test_rows_without_an_end_are_what_was_sampled(small: LlamaForCausalLM) -> None:
    heats = torch.tensor([0.0, 0.8, 1.5])
    said = sample(small, BEGINNINGS[0].tolist(), num_tokens=16, temperatures=heats, seed=3)
    assert torch.equal(written(small, frozenset()), torch.cat([BEGINNINGS[0], said], dim=1))


@torch.no_grad()
def test_behind_an_end_another_text_begins_in_the_row(small: LlamaForCausalLM) -> None:
    """Of which the model sees what stands before it; positions do not go beyond those of a row."""
    plain = written(small, frozenset())
    ends = frozenset(plain[:, 6].tolist())
    rows = written(small, ends)
    assert rows.shape == plain.shape
    for number, row in enumerate(rows.tolist()):
        first = 4 + text_length(plain[number, 4:].tolist(), ends)
        assert first <= 7
        assert row[:first] == plain[number, :first].tolist()
        assert row[first : first + 4] == BEGINNINGS[1, number].tolist()
    greedy, place, begun = rows[0].tolist(), 4, 0
    while place < len(greedy):  # each token is the likeliest behind all before it, or of a beginning
        chosen = int(small(torch.tensor([greedy[:place]])).logits[0, -1].argmax())
        assert greedy[place] == chosen
        place += 1
        if chosen in ends:
            begun += 1
            assert greedy[place : place + 4] == BEGINNINGS[begun % 4, 0].tolist()[: 20 - place]
            place += 4
    assert begun >= 1


def test_rows_of_a_model_with_a_table_of_positions_do_not_leave_it() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=20, pad_token_id=0)
    rows = written(GPT2LMHeadModel(config).eval(), frozenset(range(0, 64, 3)))  # type: ignore[arg-type]
    assert rows.shape == (3, 20)
