"""What heads get of a target that other processes run, of which only the folder is here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from specdec.core.errors import ConfigError
from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.eagle3 import save_eagle3
from specdec.drafters.eagle3 import Eagle3, Eagle3Settings
from specdec.model.config import ModelConfig
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.head_target import HeadTarget
from specdec.proposers.heads_factory import LoadedFeatureDrafter, load_remote_heads
from tests.architectures import save_model

FILE = "model.safetensors"


def save_head(target: Path, architecture: str, out: Path) -> torch.Tensor:
    """Write a target, and a head for it with a copy of its embeddings, which are returned."""
    parts = TargetParts.of(save_model(target, architecture))
    layer = LlamaConfig(
        vocab_size=parts.vocab_size,
        hidden_size=parts.hidden_size,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    save_eagle3(Eagle3(parts, Eagle3Settings(config=layer, fused_layers=(2, 1, 2))), out)
    rows = parts.embeddings.weight
    assert isinstance(rows, torch.Tensor)
    store_embeddings(out, rows.detach())
    return rows.detach()


def store_embeddings(head: Path, rows: torch.Tensor) -> None:
    tensors = load_file(head / FILE) | {"embed_tokens.weight": rows}
    save_file(tensors, head / FILE, metadata={"format": "pt"})


def remote_head(target: Path, head: Path) -> Eagle3:
    config = SpeculativeConfig(
        method="eagle3", model=str(head), heads_at="draft_pool", num_speculative_tokens=2, device="cpu"
    )
    made = load_remote_heads(
        config, ModelConfig(model=str(target)), max_num_seqs=2, max_num_batched_tokens=64
    )
    assert isinstance(made, LoadedFeatureDrafter)
    assert isinstance(made.drafter, Eagle3)
    return made.drafter


def test_a_copy_of_the_targets_embeddings_is_not_kept_in_a_draft_worker(tmp_path: Path) -> None:
    """As beside the target: what is drafted must not depend on where."""
    rows = save_head(tmp_path / "target", "llama", tmp_path / "head")
    head = remote_head(tmp_path / "target", tmp_path / "head")
    assert head.embed_tokens is None
    assert torch.equal(head.embed(torch.tensor([[7]]))[0, 0], rows[7])
    assert next(head.target.head.parameters()).is_meta, "nobody reads the target's LM head"


def test_other_embeddings_stay_the_heads_own(tmp_path: Path) -> None:
    rows = save_head(tmp_path / "target", "llama", tmp_path / "head")
    store_embeddings(tmp_path / "head", rows + 1.0)
    head = remote_head(tmp_path / "target", tmp_path / "head")
    assert torch.equal(head.embed(torch.tensor([[7]]))[0, 0], rows[7] + 1.0)
    assert next(head.target.embeddings.parameters()).is_meta, "what they were compared with is let go"


def test_embeddings_that_are_more_than_a_matrix_are_not_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They cannot be made without the model around them; a head that has its own does not need them."""
    rows = save_head(tmp_path / "target", "gemma3", tmp_path / "head")
    target = HeadTarget.elsewhere(ModelConfig(model=str(tmp_path / "target")), device="cpu", dtype="auto")
    with pytest.raises(ConfigError, match="is more than a matrix"):
        target.whole()
    assert next(target.with_embeddings().parts.embeddings.parameters()).is_meta
    head = remote_head(tmp_path / "target", tmp_path / "head")
    assert torch.equal(head.embed(torch.tensor([[7]]))[0, 0], rows[7])
    assert "is not the target's" not in caplog.text
