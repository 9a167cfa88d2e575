"""The floor of a step, and what is said of measured cells; without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.gpu_decode import bytes_of_weights, headlines
from benchmarks.gpu_models import random_model


def tiny(*, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_the_head_is_read_whether_or_not_it_is_the_embedding(tied: bool) -> None:
    loaded = random_model(tiny(tied=tied), torch.device("cpu"), max_model_len=64)
    everything = sum(one.nbytes for one in loaded.model.parameters())
    embedding = 64 * 32 * torch.bfloat16.itemsize
    assert bytes_of_weights(loaded) == (everything if tied else everything - embedding)
    own_head = random_model(tiny(tied=False), torch.device("cpu"), max_model_len=64)
    assert bytes_of_weights(loaded) == bytes_of_weights(own_head)


def cell(batch: int, context: int, rows: int, step_ms: float, **more: float) -> dict[str, Any]:
    ms = {"device": step_ms / 2, "step": step_ms, "floor": 1.0, **more}
    shape = {"batch": batch, "context": context, "rows": rows}
    return {**shape, "ms": ms, "device_times_floor": step_ms / 2, "step_times_floor": step_ms}


def test_headlines_are_of_one_sequence_and_of_the_largest_batch() -> None:
    steps = [
        cell(1, 512, 1, 2.0, eager=10.0),
        cell(1, 512, 5, 3.0, eager=11.0),
        cell(1, 16384, 1, 4.0),
        cell(1, 16384, 5, 5.0),
        cell(32, 4096, 1, 1.5),
        cell(32, 4096, 5, 1.7),
    ]
    numbers = headlines(steps, [{"times_floor": 1.25}], [{"rows": 160, "ms": {"sampled": 0.5}}], 4e12)
    assert numbers == {
        "gpu_bandwidth_tb_s": 4.0,
        "gpu_decode_ms_b1": 2.0,
        "gpu_decode_times_floor_b1": 2.0,
        "gpu_verify_over_decode_b1": 1.5,
        "gpu_decode_times_floor_largest": 1.5,
        "gpu_graphs_speedup_b1": 5.0,
        "gpu_draft_loop_times_floor_b1": 1.25,
        "gpu_choosing_ms_160_rows": 0.5,
    }
