"""Which attention heads with K/V of their own get: the one configured, or their device's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.attention import registry
from specdec.core.errors import ConfigError, ResourceError
from specdec.drafters.base import TargetParts
from specdec.drafters.checkpoints.eagle import save_eagle
from specdec.drafters.checkpoints.hydra import save_hydra
from specdec.drafters.checkpoints.parallel_heads import save_parallel_heads
from specdec.drafters.eagle import Eagle
from specdec.drafters.hydra import Hydra
from specdec.drafters.parallel_heads import ParallelHeads
from specdec.model.config import ModelConfig
from specdec.model.loader import load_model
from specdec.proposers.config import SpeculativeConfig
from specdec.proposers.heads_factory import (
    LoadedDrafter,
    LoadedFeatureDrafter,
    LoadedHeads,
    load_heads,
    load_remote_heads,
)
from tests.architectures import save_model

METHODS = ("eagle", "parallel_heads")
SIZES: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 32}


class FakeNative:
    """Stands for the C++ kernel, which needs a compiler."""

    name = "cpu"
    most_head_dim = 256

    def __init__(self, cache_dir: str | None) -> None:
        pass

    def supports(self, dtype: torch.dtype, head_dim: int) -> bool:
        return head_dim <= self.most_head_dim


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CpuPagedAttention", FakeNative)


@pytest.fixture
def target(tmp_path: Path) -> ModelConfig:
    """A target, beside folders of heads for it."""
    parts = TargetParts.of(save_model(tmp_path / "target", "llama"))
    one_layer = copy.deepcopy(parts.config)
    one_layer.num_hidden_layers = 1
    save_eagle(Eagle(parts, one_layer), tmp_path / "eagle")
    save_parallel_heads(ParallelHeads(parts, num_heads=2), tmp_path / "parallel_heads", base_model="target")
    save_hydra(Hydra(parts, num_heads=2), tmp_path / "hydra", base_model="target")
    return ModelConfig(model=str(tmp_path / "target"), dtype="float32", device="cpu")


def config(method: str, target: ModelConfig, **changes: Any) -> SpeculativeConfig:
    folder = Path(target.model).parent / method
    settings: dict[str, Any] = {"method": method, "model": str(folder), "num_speculative_tokens": 2}
    return SpeculativeConfig.model_validate(settings | {"cache": {"num_blocks": 20}} | changes)


def attention_of(made: LoadedDrafter) -> str:
    if isinstance(made, LoadedFeatureDrafter):
        return made.runner._model.backend.name
    assert isinstance(made, LoadedHeads)
    assert made.pool is not None
    return made.pool.backend.name


@pytest.mark.parametrize("method", METHODS)
def test_they_attend_as_is_configured(target: ModelConfig, method: str) -> None:
    loaded = load_model(target)
    for asked, expected in (("auto", "sdpa"), ("cpu", "cpu"), ("sdpa", "sdpa")):
        one = config(method, target, attention_backend=asked)
        assert attention_of(load_heads(one, loaded, **SIZES)) == expected


@pytest.mark.parametrize("method", METHODS)
def test_what_cannot_attend_so_is_named(
    target: ModelConfig, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeNative, "most_head_dim", 4)
    loaded = load_model(target)
    with pytest.raises(ResourceError, match=r"^speculative_config\.attention_backend cpu: .* heads of"):
        load_heads(config(method, target, attention_backend="cpu"), loaded, **SIZES)


def test_heads_that_attend_to_nothing_have_no_attention(target: ModelConfig) -> None:
    loaded = load_model(target)
    load_heads(config("hydra", target), loaded, **SIZES)
    with pytest.raises(ConfigError, match=r"attention_backend: cpu is about heads with K/V of their own;"):
        load_heads(config("hydra", target, attention_backend="cpu"), loaded, **SIZES)


def test_so_do_those_in_draft_workers(target: ModelConfig) -> None:
    for asked, expected in (("auto", "sdpa"), ("cpu", "cpu")):
        one = config("eagle", target, heads_at="draft_pool", device="cpu", attention_backend=asked)
        assert attention_of(load_remote_heads(one, target, **SIZES)) == expected
