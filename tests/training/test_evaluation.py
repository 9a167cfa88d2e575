from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from training.divergence import DIVERGENCES, divergence
from training.evaluation import (
    acceptance_summary,
    accepted_per_round,
    draft_matches,
    exit_losses,
    generate_streams,
    held_out_windows,
    loop_start,
)
from training.generation import gumbel_noise, sample
from training.ngram_baseline import KneserNey, join_documents


def test_windows_predict_every_token_once() -> None:
    document = (np.arange(10_000) % 60 + 4).astype(np.uint16)
    windows = held_out_windows([document, document[:5]], separator=0)
    predicted = torch.cat([window[1:] for window in windows])
    assert predicted.tolist() == [*document.tolist(), *document[:5].tolist()]
    assert windows[0][0] == 0
    assert windows[1][0] == document[4095]


def test_last_exit_is_the_model(tiny_config: LlamaConfig) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config).eval()
    window = torch.randint(6, 64, (20,))
    losses = exit_losses(model, [window])
    expected = model(window[None], labels=window[None]).loss
    assert losses.shape == (4, 19)
    assert losses[-1].mean().item() == pytest.approx(expected.item(), rel=1e-5)


def test_loops_start_after_their_first_cycle() -> None:
    assert loop_start([*range(100, 110), *range(32), *range(32)]) == 42
    assert loop_start([8, 9, *[1, 2] * 40]) == 4
    assert loop_start([1] * 64) == 1
    assert loop_start([*range(33), *range(33)]) is None


def test_rounds_accept_runs_of_matches() -> None:
    matches = [True, True, False, True, True, True, True, True, False, False, True, True]
    # From 0: two accepted, a third token emitted. From 3: four accepted, one emitted. From 8: none.
    assert accepted_per_round(matches, k=4) == [2, 4, 0]
    summary = acceptance_summary([2, 4, 0], k=4)
    assert summary["mean_accepted"] == 2.0
    assert summary["acceptance"] == pytest.approx(6 / (3 + 4 + 1))
    assert summary["reached"] == pytest.approx([0.6667, 0.6667, 0.3333, 0.3333])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_drafts_for_itself_without_a_miss(tiny_config: LlamaConfig, temperature: float) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config).eval()
    prompts = [[7, 8, 9], [10, 11, 12, 13, 14], [15]]
    tokens = generate_streams(model, prompts, temperature, 0, frozenset())
    assert all(all(row) for row in draft_matches(model, tokens))


def test_sampling_matches_transformers_generate(tiny_config: LlamaConfig) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config).eval()
    model.generation_config.eos_token_id = None
    prompts = [[7, 8, 9], [10, 11, 12, 13, 14], [15]]
    rows = sample(model, prompts, num_tokens=12, temperatures=torch.zeros(3), seed=0)
    for row, prompt in zip(rows, prompts, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
        assert row.tolist() == expected[0, len(prompt) :].tolist()


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(seed=1, step=2, rows=50, vocab_size=4000)
    assert torch.equal(noise, gumbel_noise(seed=1, step=2, rows=50, vocab_size=4000))
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_vanish_only_for_equal_distributions(name: str) -> None:
    torch.manual_seed(0)
    p, q = torch.randn(5, 9), torch.randn(5, 9)
    assert divergence(name, p, p).abs().max() < 1e-6  # type: ignore[arg-type]
    assert divergence(name, p, q).min() > 0  # type: ignore[arg-type]


def test_kneser_ney_is_a_distribution() -> None:
    """Probabilities of all next tokens sum to one, in seen and in unseen contexts."""
    stream = np.random.default_rng(0).zipf(1.6, size=20_000).clip(max=4095).astype(np.uint16)
    model = KneserNey(stream)
    for context in (stream[100:104], np.array([4000, 4001, 4002, 4003], dtype=np.uint16)):
        rows = np.concatenate([np.append(context, token).astype(np.uint16) for token in range(4096)])
        log_p = model.log_probabilities(rows)[::5]
        assert np.exp(log_p).sum() == pytest.approx(1.0, abs=1e-9)


def test_kneser_ney_learns_what_repeats() -> None:
    document = np.tile(np.arange(10, 30, dtype=np.uint16), 200)
    model = KneserNey(join_documents([document], 0))
    losses = -model.log_probabilities(join_documents([document[:100]], 0))
    assert losses[5:-1].mean() < 0.1
