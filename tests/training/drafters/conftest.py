"""A tiny target with a tokenizer, and texts for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tests.architectures import make_tokenizer


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=128,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=6,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=128,
            bos_token_id=1,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
        # Distributions that are worth learning: at first a drafter is far from them.
        model.get_output_embeddings().weight.mul_(4.0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def model(target_folder: Path) -> PreTrainedModel:
    loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    return loaded.eval().requires_grad_(requires_grad=False)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of texts that follow a simple rule."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        line = "".join(chr(97 + (number + i) % 26) for i in range(40))
        (folder / f"{number}.txt").write_text((line + "\n") * 8)
    return folder
