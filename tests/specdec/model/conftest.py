"""Tiny checkpoints, saved and loaded once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import PreTrainedModel

from specdec.kv.config import CacheConfig
from specdec.model.config import ModelConfig
from specdec.model.loader import LoadedModel, load_model
from specdec.model.runner import ModelRunner
from tests.architectures import save_model


class Pair(NamedTuple):
    """One model twice: as transformers runs it, and loaded for the engine."""

    reference: PreTrainedModel
    loaded: LoadedModel

    def runner(self, num_blocks: int = 200, block_size: int = 4) -> ModelRunner:
        cache = CacheConfig(num_blocks=num_blocks, block_size=block_size)
        return ModelRunner(self.loaded, cache, max_num_seqs=32)


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    @cache
    def make(architecture: str) -> Pair:
        folder: Path = tmp_path_factory.mktemp(architecture)
        reference = save_model(folder, architecture)
        return Pair(reference, load_model(ModelConfig(model=str(folder))))

    return make
